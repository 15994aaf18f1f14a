//! The row-wise kernels on Flex, and their gradients, against PyTorch fixtures and naive f64 references.
#![cfg(feature = "flex")]

#[path = "rows/cross_entropy.rs"]
mod cross_entropy;
#[path = "rows/dropout.rs"]
mod dropout;
#[path = "rows/layouts.rs"]
mod layouts;
#[path = "rows/norms.rs"]
mod norms;
#[path = "rows/rotary.rs"]
mod rotary;
#[path = "rows/support.rs"]
mod support;
#[path = "rows/swiglu.rs"]
mod swiglu;
