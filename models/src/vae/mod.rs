//! A causal 3-D video VAE whose frames may be sharded: Wan's, of both versions (arXiv 2503.20314), as diffusers'
//! `AutoencoderKLWan` computes it.
//!
//! Every layer refuses a clip of other channels, or one that is partial; one that looks back in time also a clip whose
//! frames are sharded over several axes, or into several ranges a rank.

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
