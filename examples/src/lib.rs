#![doc = include_str!("../README.md")]

pub mod add_sp;
pub mod config;
mod corpus;
mod draw;
mod error;
mod everyone;
pub mod flags;
mod fnv;
#[cfg(doctest)]
mod guide;
pub mod learner;
mod listing;
pub mod measure;
pub mod memory;
mod meter;
pub mod plan;
pub mod progress;
pub mod report;
pub mod sample;
mod saving;
pub mod spatial_temporal;
pub mod summary;
pub mod text;
mod tokenize;
pub mod tokens;
pub mod trace;
pub mod train;
pub mod train_video;
mod trainer;
pub mod video;

pub use error::{InputError, RunError, exit};
