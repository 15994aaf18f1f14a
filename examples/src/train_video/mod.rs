//! Training a causal video transformer on clips, their tokens split over the mesh, and sampling from it.

mod config;
mod flags;
mod latents;
mod samples;
mod task;

pub use config::VideoTrainConfig;
pub use flags::{VideoModelFlags, VideoTrainFlags};
pub use task::train;
