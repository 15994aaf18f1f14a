//! Kernels that work row by row: a row is read once, stays in the nearest cache, and its results are written once.
//!
//! Every sum runs over a fixed number of lanes and a fixed split of the rows, and nothing is contracted to fused
//! multiply-adds: the bits depend neither on the number of threads nor on the instruction set chosen.

pub mod cross_entropy;
pub mod dropout;
pub mod gelu;
pub mod layer_norm;
pub mod rms_norm;
pub mod rotary;
mod scalar;
mod support;
pub mod swiglu;
