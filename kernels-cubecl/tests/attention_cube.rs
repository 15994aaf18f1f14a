//! The suite of tests/attention.rs on CubeCL, through wgpu.

#[path = "attention/accuracy.rs"]
mod accuracy;
#[path = "attention/dropout.rs"]
mod dropout;
#[path = "attention/fixtures.rs"]
mod fixtures;
#[path = "attention/invariants.rs"]
mod invariants;
#[path = "attention/masks.rs"]
mod masks;
#[path = "attention/merging.rs"]
mod merging;
#[path = "attention/nan.rs"]
mod nan;
#[path = "attention/refusals.rs"]
mod refusals;
#[path = "attention/support.rs"]
mod support;

mod backend {
    use burn::tensor::{DType, Device};

    pub type Raw = burn_cubecl::Cube;

    /// Whether weights are rounded to the dtype of the inputs.
    pub const ROUNDED_WEIGHTS: bool = false;

    pub fn device() -> Device {
        Device::wgpu(Default::default())
    }

    pub fn supports(dtype: DType) -> bool {
        device().supports_dtype(dtype)
    }
}
