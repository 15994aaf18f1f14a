//! The suite of tests/rows.rs on CubeCL, through wgpu, and that both draw the same masks.
#![cfg(feature = "flex")]

mod backend {
    use burn::tensor::{DType, Device, Tensor};
    use burn_cubecl::Cube;
    use cubecl::ir::{ElemType, FloatKind};
    use kernels_cubecl::cube::resolve_float;

    pub type Raw = Cube;

    pub fn device() -> Device {
        Device::wgpu(Default::default())
    }

    /// Those of the device.
    pub fn dtypes() -> Vec<DType> {
        let tensor = Tensor::<1>::zeros([1], &device());
        let tensor = resolve_float(tensor.try_into_primitive::<Cube>().unwrap());
        let kinds = [
            (DType::F64, FloatKind::F64),
            (DType::F32, FloatKind::F32),
            (DType::BF16, FloatKind::BF16),
            (DType::F16, FloatKind::F16),
        ];
        let known = |kind| tensor.client.properties().supports_type(ElemType::Float(kind));
        for (dtype, _) in kinds.iter().filter(|(_, kind)| !known(*kind)) {
            eprintln!("skipped: no {dtype:?} on this device");
        }
        kinds
            .into_iter()
            .filter(|(_, kind)| known(*kind))
            .map(|(dtype, _)| dtype)
            .collect()
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
#[path = "rows/same_masks.rs"]
mod same_masks;
#[path = "rows/support.rs"]
mod support;
#[path = "rows/swiglu.rs"]
mod swiglu;
#[path = "rows/widths.rs"]
mod widths;
