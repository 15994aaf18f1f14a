//! Flex: buffers share the storage of tensors, both ways.

use burn::backend::Flex;
use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_flex::{FlexTensor, Layout};
use burn_sp_comm::{
    Buffer, CommError,
    buffer::{HostView, Storage},
    raise,
};

use crate::tensor::{SpBackend, SpOps, ops::plain_ops};

impl SpBackend for Flex {
    const IN_HOST_MEMORY: bool = true;

    /// Burn 0.22's products on Flex hold their result twice for a moment, which for one of all tokens can be the most
    /// that a rank ever holds.
    const ROWS_AT_ONCE: usize = 1024;

    fn float_into_buffer(tensor: FloatTensor<Self>) -> Buffer {
        share(tensor)
    }

    fn float_from_buffer(buffer: Buffer, _device: &Device<Self>) -> FloatTensor<Self> {
        adopt(buffer)
    }

    fn int_into_buffer(tensor: IntTensor<Self>) -> Buffer {
        share(tensor)
    }

    fn int_from_buffer(buffer: Buffer, _device: &Device<Self>) -> IntTensor<Self> {
        adopt(buffer)
    }

    fn bool_into_buffer(tensor: BoolTensor<Self>) -> Buffer {
        share(tensor)
    }

    fn bool_from_buffer(buffer: Buffer, _device: &Device<Self>) -> BoolTensor<Self> {
        adopt(buffer)
    }
}

plain_ops!(Flex);

/// Flex storage is reference-counted and copied on write, so a buffer can point into it for as long as it likes.
fn share(tensor: FlexTensor) -> Buffer {
    let layout = tensor.layout();
    Buffer::new(
        tensor.data_arc(),
        layout.shape().to_vec(),
        layout.strides().to_vec(),
        layout.start_offset(),
        tensor.dtype(),
    )
    .unwrap_or_else(|error| raise(error))
}

fn adopt(buffer: Buffer) -> FlexTensor {
    let (storage, shape, dtype) = buffer.into_parts();
    let Storage::Host(HostView { bytes, strides, offset }) = storage else {
        raise(CommError::invalid("a tensor on a device was sent to a rank on Flex"))
    };
    FlexTensor::from_arc(bytes, Layout::new(shape.into(), strides, offset), dtype)
}
