#![doc = include_str!("../README.md")]

pub mod config;
mod draw;
mod error;
mod everyone;
pub mod flags;
pub mod measure;
pub mod memory;
mod meter;
pub mod plan;
pub mod progress;
pub mod report;
mod saving;
pub mod spatial_temporal;
pub mod summary;
pub mod text;
pub mod trace;
pub mod train;
pub mod train_video;
mod trainer;
pub mod video;

pub use error::{InputError, RunError, exit};
