use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::Float;
use crate::{DropoutSpec, Kernels, RotaryStyle};

pub fn rms_norm<B: Kernels, C: CheckpointStrategy>(_x: Float<B, C>, _w: Float<B, C>, _eps: f64) -> Float<B, C> {
    todo!()
}
pub fn layer_norm<B: Kernels, C: CheckpointStrategy>(
    _x: Float<B, C>,
    _w: Float<B, C>,
    _b: Float<B, C>,
    _eps: f64,
) -> Float<B, C> {
    todo!()
}
pub fn swiglu<B: Kernels, C: CheckpointStrategy>(_g: Float<B, C>, _u: Float<B, C>) -> Float<B, C> {
    todo!()
}
pub fn rotary<B: Kernels, C: CheckpointStrategy>(
    _x: Float<B, C>,
    _c: Float<B, C>,
    _s: Float<B, C>,
    _st: RotaryStyle,
) -> Float<B, C> {
    todo!()
}
pub fn dropout<B: Kernels, C: CheckpointStrategy>(_x: Float<B, C>, _s: DropoutSpec) -> Float<B, C> {
    todo!()
}
