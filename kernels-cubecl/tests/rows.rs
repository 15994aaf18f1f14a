//! The row-wise kernels on Flex, and their gradients, against PyTorch fixtures and naive f64 references.
#![cfg(feature = "flex")]

mod backend {
    use burn::tensor::{DType, Device};

    pub type Raw = burn::backend::Flex;

    pub fn device() -> Device {
        Device::flex()
    }

    pub fn dtypes() -> Vec<DType> {
        vec![DType::F64, DType::F32, DType::BF16, DType::F16]
    }
}

#[path = "rows/cross_entropy.rs"]
mod cross_entropy;
#[path = "rows/dropout.rs"]
mod dropout;
#[path = "rows/gelu.rs"]
mod gelu;
#[path = "rows/layouts.rs"]
mod layouts;
#[path = "rows/norms.rs"]
mod norms;
#[path = "rows/residual.rs"]
mod residual;
#[path = "rows/rotary.rs"]
mod rotary;
#[path = "rows/support.rs"]
mod support;
#[path = "rows/swiglu.rs"]
mod swiglu;
#[path = "rows/widths.rs"]
mod widths;
