//! Below autodiff: matrix products that take empty matrices, which Flex's do not, and zeros.

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Float, Shape, Slice, Tensor};

use super::{SpBackend, kind::select};

/// `a * b` for `[m, k]` and `[k, n]`, any of which may be 0.
///
/// Many rows are computed some at a time where the backend is better off so.
pub(crate) fn product<B: SpBackend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let ([m, k], [_, n]) = (a.shape().dims(), b.shape().dims());
    if m * k * n == 0 {
        return zeros::<B>([m, n], &a.device(), a.dtype());
    }
    by_rows::<B>([m, n], &a.device(), a.dtype(), |chunk| {
        let part = select::<B, Float>(a.clone(), 0, std::slice::from_ref(&chunk));
        B::float_matmul(part, b.clone())
    })
}

/// A matrix of this shape, of which `part` makes some rows at a time.
pub(crate) fn by_rows<B: SpBackend>(
    [rows, columns]: [usize; 2],
    device: &Device<B>,
    dtype: DType,
    part: impl Fn(Range<usize>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    if rows <= B::ROWS_AT_ONCE {
        return part(0..rows);
    }
    let mut whole = zeros::<B>([rows, columns], device, dtype);
    for start in (0..rows).step_by(B::ROWS_AT_ONCE) {
        let chunk = start..rows.min(start + B::ROWS_AT_ONCE);
        let block = [Slice::from(chunk.clone()), Slice::from(0..columns)];
        whole = B::float_slice_assign(whole, &block, part(chunk));
    }
    whole
}

/// All dimensions but the last made one: `[rows, features]`.
pub(crate) fn rows<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let (features, outer) = shape.as_slice().split_last().expect("a tensor with features");
    let rows = outer.iter().product();
    let features = *features;
    B::float_reshape(tensor, [rows, features].into())
}

/// The same elements in memory of their own, where they may be a view of others, which would live on with it.
pub(crate) fn own_storage<const D: usize>(view: Tensor<D>) -> Tensor<D> {
    let (device, dtype) = (view.device(), view.dtype());
    Tensor::from_data(view.into_data(), (&device, dtype))
}

/// Zeros. Burn 0.22's own on Flex allocate twice what they need, and copy; a tensor filled with a value does not.
pub(crate) fn zeros<B: Backend>(shape: impl Into<Shape>, device: &Device<B>, dtype: DType) -> FloatTensor<B> {
    B::float_full(shape.into(), 0.0.into(), device, dtype.into())
}

pub(super) fn zeros_int<B: Backend>(shape: Vec<usize>, device: &Device<B>, dtype: DType) -> IntTensor<B> {
    B::int_zeros(shape.into(), device, dtype.into())
}

pub(super) fn zeros_bool<B: Backend>(shape: Vec<usize>, device: &Device<B>, dtype: DType) -> BoolTensor<B> {
    B::bool_zeros(shape.into(), device, dtype.into())
}
