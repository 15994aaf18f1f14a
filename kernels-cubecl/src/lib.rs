#![doc = include_str!("../README.md")]

mod autodiff;
#[cfg(feature = "flex")]
mod flex;
mod functions;
mod kernels;
mod mask;
mod ops;
pub mod philox;
mod positions;
mod spec;

pub use functions::*;
pub use kernels::Kernels;
pub use mask::{Mask, Tile};
pub use ops::FusedOps;
pub use positions::Positions;
pub use spec::{AttentionSpec, DropoutSpec, HeadMap, RotaryStyle};
