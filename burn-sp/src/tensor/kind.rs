//! Float, int and bool tensors behind one small interface, so that layout changes are written once.

use std::{marker::PhantomData, ops::Range};

use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{Bool, Float, Int, Slice, Tensor, kind::Basic};
use burn_sp_comm::{Buffer, Collective, Communicator, Pending, Site, Transfer, raise};

use super::{
    SpBackend, SpOps,
    product::{zeros, zeros_bool, zeros_int},
    transition::Transition,
};

/// The operations that a layout change needs of one kind of tensor, below autodiff.
pub(crate) trait Primitive<B: SpBackend>: Sized {
    type Tensor: TensorMetadata<Device = Device<B>>;
    fn slice(tensor: Self::Tensor, slices: &[Slice]) -> Self::Tensor;
    fn slice_assign(tensor: Self::Tensor, slices: &[Slice], value: Self::Tensor) -> Self::Tensor;
    fn cat(tensors: Vec<Self::Tensor>, dim: usize) -> Self::Tensor;
    fn zeros(shape: Vec<usize>, like: &Self::Tensor) -> Self::Tensor;
    fn into_buffer(tensor: Self::Tensor) -> Buffer;
    fn from_buffer(buffer: Buffer, device: &Device<B>) -> Self::Tensor;
}

macro_rules! primitive {
    ($kind:ident, $tensor:ident, $slice:ident, $assign:ident, $cat:ident, $zeros:ident, $into:ident, $from:ident) => {
        impl<B: SpBackend> Primitive<B> for $kind {
            type Tensor = $tensor<B>;

            fn slice(tensor: Self::Tensor, slices: &[Slice]) -> Self::Tensor {
                B::$slice(tensor, slices)
            }

            fn slice_assign(tensor: Self::Tensor, slices: &[Slice], value: Self::Tensor) -> Self::Tensor {
                B::$assign(tensor, slices, value)
            }

            fn cat(tensors: Vec<Self::Tensor>, dim: usize) -> Self::Tensor {
                B::$cat(tensors, dim)
            }

            fn zeros(shape: Vec<usize>, like: &Self::Tensor) -> Self::Tensor {
                $zeros::<B>(shape, &like.device(), like.dtype())
            }

            fn into_buffer(tensor: Self::Tensor) -> Buffer {
                B::$into(tensor)
            }

            fn from_buffer(buffer: Buffer, device: &Device<B>) -> Self::Tensor {
                B::$from(buffer, device)
            }
        }
    };
}

primitive!(
    Float,
    FloatTensor,
    float_slice,
    float_slice_assign,
    float_cat,
    zeros,
    float_into_buffer,
    float_from_buffer
);
primitive!(
    Int,
    IntTensor,
    int_slice,
    int_slice_assign,
    int_cat,
    zeros_int,
    int_into_buffer,
    int_from_buffer
);
primitive!(
    Bool,
    BoolTensor,
    bool_slice,
    bool_slice_assign,
    bool_cat,
    zeros_bool,
    bool_into_buffer,
    bool_from_buffer
);

/// The given ranges of a dimension, in that order. One range is a view.
pub(crate) fn select<B: SpBackend, K: Primitive<B>>(
    tensor: K::Tensor,
    dim: usize,
    ranges: &[Range<usize>],
) -> K::Tensor {
    let mut shape = tensor.shape().to_vec();
    shape[dim] = ranges.iter().map(|range| range.len()).sum();
    if shape.contains(&0) {
        // Not a view: Flex fails on a view of nothing that does not start at 0.
        return K::zeros(shape, &tensor);
    }
    match ranges {
        [range] => K::slice(tensor.clone(), &at(&tensor, dim, range.clone())),
        _ => {
            let pieces = ranges
                .iter()
                .map(|range| K::slice(tensor.clone(), &at(&tensor, dim, range.clone())));
            K::cat(pieces.collect(), dim)
        }
    }
}

/// A tensor of `len` along `dim` that holds `tensor` at the given ranges and zeros elsewhere.
pub(crate) fn place<B: SpBackend, K: Primitive<B>>(
    tensor: K::Tensor,
    dim: usize,
    len: usize,
    ranges: &[Range<usize>],
) -> K::Tensor {
    let mut shape = tensor.shape().to_vec();
    shape[dim] = len;
    let empty = shape.contains(&0);
    let mut whole = K::zeros(shape, &tensor);
    if empty {
        return whole;
    }
    let mut from = 0;
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let piece = K::slice(tensor.clone(), &at(&tensor, dim, from..from + range.len()));
        let target = at(&whole, dim, range.clone());
        whole = K::slice_assign(whole, &target, piece);
        from += range.len();
    }
    whole
}

/// Runs one collective over several tensors, in one message. A failure unwinds to the launcher with its report.
pub(crate) fn exchange<B: SpBackend, K: Primitive<B>, const N: usize>(
    transfers: [(Collective, K::Tensor); N],
    comm: &dyn Communicator,
    site: Site,
) -> [K::Tensor; N] {
    Underway::<B, K, N>::start(transfers, comm, site).wait()
}

/// An [`exchange`] that has been started; the rank goes on computing until it needs the results.
pub(crate) struct Underway<B: SpBackend, K: Primitive<B>, const N: usize> {
    pending: Box<dyn Pending>,
    device: Device<B>,
    kind: PhantomData<K>,
}

impl<B: SpBackend, K: Primitive<B>, const N: usize> Underway<B, K, N> {
    pub fn start(transfers: [(Collective, K::Tensor); N], comm: &dyn Communicator, site: Site) -> Self {
        let device = transfers[0].1.device();
        let transfers = transfers.map(|(op, tensor)| Transfer {
            op,
            buffer: K::into_buffer(tensor),
        });
        Self {
            pending: comm.start(transfers.into(), site).unwrap_or_else(|error| raise(error)),
            device,
            kind: PhantomData,
        }
    }

    pub fn wait(self) -> [K::Tensor; N] {
        let buffers = self.pending.wait().unwrap_or_else(|error| raise(error));
        let count = buffers.len();
        let buffers: [Buffer; N] = buffers
            .try_into()
            .unwrap_or_else(|_| unreachable!("an exchange of {N} tensors returned {count}"));
        buffers.map(|buffer| K::from_buffer(buffer, &self.device))
    }
}

/// This range of a dimension, with all of the others.
pub(crate) fn at(tensor: &impl TensorMetadata, dim: usize, range: Range<usize>) -> Vec<Slice> {
    let whole = tensor.shape();
    (0..whole.num_dims())
        .map(|d| if d == dim { range.clone() } else { 0..whole[d] })
        .map(Slice::from)
        .collect()
}

/// The kinds of Burn tensors that can have a layout: `Float`, `Int` and `Bool`.
pub trait SpKind: Basic + Sized {
    #[doc(hidden)]
    fn transition<const D: usize>(tensor: Tensor<D, Self>, transition: Transition) -> Tensor<D, Self>;
}

macro_rules! kind {
    ($kind:ident, $op:ident) => {
        impl SpKind for $kind {
            fn transition<const D: usize>(tensor: Tensor<D, Self>, transition: Transition) -> Tensor<D, Self> {
                Tensor::from_dispatch(<Dispatch as SpOps>::$op(tensor.into_dispatch(), transition))
            }
        }
    };
}

kind!(Float, redistribute);
kind!(Int, redistribute_int);
kind!(Bool, redistribute_bool);
