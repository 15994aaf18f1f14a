//! Modules that Burn lacks or that keep too much: norms on the fused kernels, rotary embedding at global positions,
//! dropout whose mask does not depend on the layout.

mod dropout;
mod norm;
mod rotary;

pub use dropout::{Dropout, DropoutKey};
pub use norm::{LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig};
pub use rotary::{Rotary, RotaryTable};
