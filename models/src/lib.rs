#![doc = include_str!("../README.md")]

pub mod transformer;
pub mod vae;
pub mod video_dit;
