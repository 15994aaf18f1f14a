#![doc = include_str!("../README.md")]

mod autodiff;
#[cfg_attr(not(any(feature = "flex", feature = "cube")), allow(dead_code))]
mod checks;
#[cfg(feature = "cube")]
pub mod cube;
mod dropout;
#[cfg(feature = "flex")]
mod flex;
mod functions;
#[cfg(any(feature = "flex", feature = "cube"))]
mod gelu;
mod kernels;
mod mask;
mod ops;
pub mod philox;
mod positions;
#[cfg(any(feature = "flex", feature = "cube"))]
mod problem;
mod spec;

pub use checks::accumulation;
pub use dropout::{AttentionDropout, DropoutSpec};
pub use functions::*;
pub use kernels::Kernels;
pub use mask::{Blocks, CustomMask, Documents, Mask, MaskRule, Tile};
pub use ops::FusedOps;
pub use positions::Positions;
pub use spec::{AttentionSpec, HeadMap, RotaryStyle};
