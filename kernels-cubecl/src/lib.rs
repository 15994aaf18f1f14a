#![doc = include_str!("../README.md")]

mod autodiff;
mod dropout;
#[cfg(feature = "flex")]
mod flex;
mod functions;
mod kernels;
mod mask;
mod ops;
pub mod philox;
mod positions;
mod spec;

pub use dropout::{AttentionDropout, DropoutSpec};
pub use functions::*;
pub use kernels::Kernels;
pub use mask::{Blocks, CustomMask, Documents, Mask, MaskRule, Tile};
pub use ops::FusedOps;
pub use positions::Positions;
pub use spec::{AttentionSpec, HeadMap, RotaryStyle};
