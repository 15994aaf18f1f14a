#![doc = include_str!("../README.md")]

mod import;
pub mod transformer;
pub mod vae;
pub mod video_dit;
