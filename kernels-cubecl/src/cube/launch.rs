//! What every kernel's host side does: outputs, tables, dtypes, cubes.

use burn::tensor::{DType, Shape};
use burn_cubecl::{ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use burn_std::Bytes;
use cubecl::prelude::*;

pub use burn::backend::cubecl::dtype_to_elem_type as elem;
pub use burn_cubecl::kernel::into_contiguous;

/// Room for a result on the device of `like`, not written yet.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// Room for two results in one buffer, for the sake of devices that let a kernel have few: the buffer, where the second
/// starts in it, and the two.
pub fn two_in_one<S: Into<Shape>>(
    like: &CubeTensor,
    shapes: [S; 2],
    dtype: DType,
) -> (CubeTensor, usize, [CubeTensor; 2]) {
    let shapes = shapes.map(Into::into);
    let [first, second] = shapes.each_ref().map(Shape::num_elements);
    let alignment = like.client.properties().memory.alignment as usize;
    let start = (first * dtype.size()).next_multiple_of(alignment) / dtype.size();
    let whole = empty(like, [start + second], dtype);
    let part = |shape: Shape, before: usize, behind: usize| {
        let [before, behind] = [before, behind].map(|elements| (elements * dtype.size()) as u64);
        let handle = whole.handle.clone().offset_start(before).offset_end(behind);
        CubeTensor::new_contiguous(whole.client.clone(), whole.device.clone(), shape, handle, dtype)
    };
    let [one, other] = shapes;
    let parts = [part(one, 0, start + second - first), part(other, start, 0)];
    (whole, start, parts)
}

/// Numbers that the host has made for a kernel, on the device of `like`.
pub fn table(like: &CubeTensor, values: Vec<u32>) -> CubeTensor {
    let shape = Shape::from([values.len()]);
    let handle = like.client.create(Bytes::from_elems(values));
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, DType::U32)
}

/// Units of a cube: what the smallest WebGPU device can do.
pub const UNITS: usize = 256;

/// The integers that address the largest of the tensors.
pub fn address(tensors: &[&CubeTensor]) -> AddressType {
    let largest = tensors.iter().map(|tensor| tensor.required_address_type()).max();
    largest.unwrap_or_default()
}

/// So many cubes, spread over two dimensions: each may have 65,535. There can be more than asked for.
pub fn cubes(count: usize) -> CubeCount {
    const MOST: usize = 65_535;
    let x = count.clamp(1, MOST);
    CubeCount::Static(x as u32, count.div_ceil(x) as u32, 1)
}

/// Cubes and their shape for `count` units that do not know of each other.
pub fn elementwise(count: usize) -> (CubeCount, CubeDim) {
    (cubes(count.div_ceil(UNITS)), CubeDim::new_1d(UNITS as u32))
}
