//! One adapter a backend; each is a handful of lines.

#[cfg(feature = "flex")]
mod flex {
    use burn::backend::Flex;
    use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
    use burn_flex::{FlexTensor, Layout};
    use burn_sp_comm::{Buffer, raise};

    use crate::tensor::{SpBackend, SpOps, ops::plain_ops};

    impl SpBackend for Flex {
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
        let (bytes, shape, strides, offset, dtype) = buffer.into_parts();
        FlexTensor::from_arc(bytes, Layout::new(shape.into(), strides, offset), dtype)
    }
}
