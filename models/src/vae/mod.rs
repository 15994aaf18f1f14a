//! A causal 3-D video VAE whose frames may be sharded: Wan's, of both versions.

mod block;
mod config;
mod conv;
mod decoder;
mod diffusers;
mod encoder;
mod frames;
mod model;
mod names;
mod norm;
mod resample;
mod shortcut;
mod slice;

pub use crate::import::ImportError;
pub use block::{AttentionBlock, MidBlock, ResidualBlock};
pub use config::VaeConfig;
pub use conv::{CausalConv3d, CausalConv3dConfig};
pub use decoder::{Decoder, UpBlock};
pub use encoder::{DownBlock, Encoder};
pub use model::Vae;
pub use norm::ChannelNorm;
pub use resample::{Downsample, Upsample};
pub use shortcut::{AverageDown, RepeatUp};
pub use slice::{EncodeSlice, HaloTooSmall};
