//! Where a tensor waits for backward.

use burn::backend::TensorMetadata;
use burn::backend::tensor::{Device, FloatTensor};
use burn::tensor::{TensorData, try_read_sync};

use crate::tensor::SpBackend;

/// Where the input of a checkpointed part waits for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// Where it is.
    #[default]
    Device,
    /// In host memory, whence it comes back when backward needs it. On a device whose memory is the host's it stays.
    Host,
}

#[derive(Clone, Debug)]
pub(super) enum Kept<B: SpBackend> {
    Device(FloatTensor<B>),
    Host(TensorData, Device<B>),
}

impl<B: SpBackend> Kept<B> {
    pub fn new(tensor: FloatTensor<B>, keep: Keep) -> Self {
        if keep == Keep::Device || B::IN_HOST_MEMORY {
            return Kept::Device(tensor);
        }
        let device = tensor.device();
        let data = try_read_sync(B::float_into_data(tensor)).expect("this platform waits for its device");
        match data {
            // Copied once more: what was read may be a view of a transfer buffer, of which a device has not many.
            Ok(data) => {
                let bytes = data.as_bytes().to_vec();
                Kept::Host(
                    TensorData::from_bytes_vec(bytes, data.shape().clone(), data.dtype()),
                    device,
                )
            }
            Err(error) => panic!("checkpoint: an input could not be read from {device:?}: {error}"),
        }
    }

    pub fn back(self) -> FloatTensor<B> {
        match self {
            Kept::Device(tensor) => tensor,
            Kept::Host(data, device) => B::float_from_data(data, &device),
        }
    }
}
