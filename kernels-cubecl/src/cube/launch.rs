//! What every kernel's host side does: outputs, tables, dtypes.

use burn::tensor::{DType, Shape};
use burn_cubecl::{ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use burn_std::Bytes;

pub use burn::backend::cubecl::dtype_to_elem_type as elem;
pub use burn_cubecl::kernel::into_contiguous;

/// Room for a result on the device of `like`, not written yet.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// Numbers that the host has made for a kernel, on the device of `like`.
pub fn table(like: &CubeTensor, values: Vec<u32>) -> CubeTensor {
    let shape = Shape::from([values.len()]);
    let handle = like.client.create(Bytes::from_elems(values));
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, DType::U32)
}

/// Low and high half.
pub fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}
