//! Matrix products below autodiff that take empty matrices, which Flex's do not.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};

/// `a * b` for `[m, k]` and `[k, n]`, any of which may be 0.
pub(crate) fn product<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let ([m, k], [_, n]) = (a.shape().dims(), b.shape().dims());
    if m * k * n == 0 {
        return B::float_zeros([m, n].into(), &a.device(), a.dtype().into());
    }
    B::float_matmul(a, b)
}

/// All dimensions but the last made one: `[rows, features]`.
pub(crate) fn rows<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let (features, outer) = shape.as_slice().split_last().expect("a tensor with features");
    let rows = outer.iter().product();
    let features = *features;
    B::float_reshape(tensor, [rows, features].into())
}
