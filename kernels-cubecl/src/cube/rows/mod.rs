//! Row-wise and elementwise kernels: one file an operation.
//!
//! Every sum runs over a fixed split of the elements in a fixed order: the bits depend on the shape and the device's
//! arithmetic alone.

pub mod cross_entropy;
pub mod dropout;
pub mod gelu;
pub mod layer_norm;
mod norm_backward;
mod norm_forward;
pub mod residual_norm;
pub mod rms_norm;
pub mod rotary;
mod support;
pub mod swiglu;
