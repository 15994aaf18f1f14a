//! Inputs, fixtures and comparisons.

use burn::backend::{Backend, DispatchKindConversion, DispatchTensor, tensor::FloatTensor};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kernels_cubecl::philox::Philox;
use safetensors::{Dtype, SafeTensors};

pub use crate::backend::{Raw, device, dtypes};

pub type Float = FloatTensor<Raw>;

/// Those of these that the device has.
pub fn among<const N: usize>(wanted: [DType; N]) -> Vec<DType> {
    let known = dtypes();
    wanted.into_iter().filter(|dtype| known.contains(dtype)).collect()
}

/// The most exact dtype of the device.
pub fn widest() -> DType {
    among([DType::F64, DType::F32])[0]
}

/// What kernels on a dtype accumulate in.
pub fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Numbers in about (-2, 2), the same in every run.
pub fn noise(len: usize, seed: u64) -> Vec<f64> {
    let mut words = vec![0; len];
    Philox::new(seed, 0).fill(0, &mut words);
    words
        .iter()
        .map(|&word| f64::from(word) / f64::from(u32::MAX) * 4.0 - 2.0)
        .collect()
}

pub fn tensor<const D: usize>(values: Vec<f64>, shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, dtype))
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().try_to_vec().unwrap()
}

pub fn raw<const D: usize>(tensor: Tensor<D>) -> Float {
    raw_of::<Raw, D>(tensor)
}

pub fn wrap<const D: usize>(tensor: Float) -> Tensor<D> {
    wrap_of::<Raw, D>(tensor)
}

pub fn raw_of<B: Backend, const D: usize>(tensor: Tensor<D>) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    tensor.try_into_primitive::<B>().unwrap()
}

pub fn wrap_of<B: Backend, const D: usize>(tensor: FloatTensor<B>) -> Tensor<D>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    Tensor::from_primitive::<B>(tensor)
}

pub fn autodiff_devices() -> [Device; 2] {
    [device().autodiff(), device().autodiff().gradient_checkpointing()]
}

/// Largest error relative to the largest reference value.
pub fn error_to_peak(found: &[f64], reference: &[f64]) -> f64 {
    assert_eq!(found.len(), reference.len());
    let peak = reference.iter().fold(0.0f64, |peak, x| peak.max(x.abs()));
    let error = found.iter().zip(reference).map(|(a, b)| (a - b).abs());
    error.fold(0.0f64, |worst, e| if e > worst || e.is_nan() { e } else { worst }) / peak.max(1e-30)
}

#[track_caller]
pub fn assert_close(name: &str, found: &[f64], reference: &[f64], tolerance: f64) {
    let error = error_to_peak(found, reference);
    assert!(
        error <= tolerance,
        "{name}: error {error:.3e} of the peak, allowed {tolerance:.3e}"
    );
}

/// A few units in the last place of the dtype, relative to a peak.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 1e-6,
        // One rounding: half a unit in the last place of 8 and 11 bits.
        DType::BF16 => 1.01 / 256.0,
        DType::F16 => 1.01 / 2048.0,
        other => panic!("{other:?}"),
    }
}

pub struct Fixture {
    bytes: Vec<u8>,
    pub description: serde_json::Value,
}

impl Fixture {
    pub fn load(family: &str) -> Self {
        let path = |extension| {
            format!(
                "{}/tests/fixtures/{family}/{family}.{extension}",
                env!("CARGO_MANIFEST_DIR")
            )
        };
        Self {
            bytes: std::fs::read(path("safetensors")).unwrap(),
            description: serde_json::from_slice(&std::fs::read(path("json")).unwrap()).unwrap(),
        }
    }

    pub fn get(&self, name: &str) -> Option<Vec<f64>> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = tensors.tensor(name).ok()?;
        let words = |size| view.data().chunks_exact(size);
        Some(match view.dtype() {
            Dtype::F32 => words(4)
                .map(|x| f32::from_le_bytes(x.try_into().unwrap()).into())
                .collect(),
            Dtype::F64 => words(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect(),
            Dtype::I64 => words(8)
                .map(|x| i64::from_le_bytes(x.try_into().unwrap()) as f64)
                .collect(),
            other => panic!("{name}: {other:?}"),
        })
    }

    pub fn tolerance(&self, case: &str, name: &str) -> f64 {
        self.description["cases"][case]["tolerances"][name]["suggested_rel_to_peak"]
            .as_f64()
            .unwrap()
    }
}

pub fn sample<const D: usize>(shape: [usize; D], dtype: DType, seed: u64) -> Tensor<D> {
    tensor(noise(shape.iter().product(), seed), shape, dtype, &device())
}
