//! Attention over the pixels of each frame, then over the frames of each pixel, of a video whose tokens are sharded: one
//! all-to-all between the two, which is one call of [`redistribute`](burn_sp::SpTensor::redistribute).

mod clips;
mod config;
mod model;
mod train;

pub use clips::clips;
pub use config::{SpatialTemporalConfig, SpatialTemporalFlags};
pub use model::{LocalAttention, SpatialTemporalBlock, SpatialTemporalModel, SpatialTemporalModelConfig};
pub use train::{Outcome, train};
