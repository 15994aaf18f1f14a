//! Fused attention on Flex against fixtures made with PyTorch, exact oracles and an independent f64 computation.
#![cfg(feature = "flex")]

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

    pub type Raw = burn::backend::Flex;

    /// Whether weights are rounded to the dtype of the inputs.
    pub const ROUNDED_WEIGHTS: bool = false;

    pub fn device() -> Device {
        Device::flex()
    }

    pub fn supports(_dtype: DType) -> bool {
        true
    }
}
