//! Tensors that are not in host memory.

use crate::{Buffer, CommError, Plan};
use burn_std::DType;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// A tensor in a device's memory: what an engine needs to know of it, and to ask of it.
///
/// Engines know no devices. One that moves tensors between ranks of a process asks a rank's own tensor to put the result
/// together, on the device where it is, from those of its peers; an engine of a device's own library finds its type
/// again with [`Buffer::device`].
pub trait DeviceTensor: Any + Debug + Send + Sync {
    /// The length of every dimension, in elements.
    fn shape(&self) -> Vec<usize>;

    /// The kind of the elements.
    fn dtype(&self) -> DType;

    /// The result of a plan on this tensor's device. `sources` by rank, where the plan needs them; they may be on other
    /// devices. Sums are added up in the order of a tile's sources, in f32 for narrower floats.
    ///
    /// # Shapes
    /// - returns [`Plan::shape`], in this tensor's dtype
    ///
    /// # Errors
    /// [`CommError::Invalid`] if a source is missing, or of another kind than this tensor.
    fn assemble(&self, plan: &Plan, sources: &[Option<&Buffer>]) -> Result<Arc<dyn DeviceTensor>, CommError>;

    /// A copy in host memory. Waits for the device.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the device fails.
    fn to_host(&self) -> Result<Buffer, CommError>;

    /// A copy of a tensor in host memory on this tensor's device.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the tensor is on a device already, or the device fails.
    fn upload(&self, buffer: Buffer) -> Result<Arc<dyn DeviceTensor>, CommError>;

    /// The tensor again, if it is in the memory of a CUDA device whose addresses others may use.
    fn cuda(&self) -> Option<&dyn CudaTensor> {
        None
    }
}

/// A tensor in the memory of a CUDA device, for an engine that hands its address to a library of that device.
pub trait CudaTensor: DeviceTensor {
    /// The same elements in another shape of as many, row-major without gaps. A copy only where they do not lie so.
    fn dense(&self, shape: &[usize]) -> Arc<dyn CudaTensor>;

    /// A dense tensor on the same device that nobody has written yet.
    fn empty(&self, shape: &[usize], dtype: DType) -> Arc<dyn CudaTensor>;

    /// Has the addresses of dense tensors of this device used by `work`: those that are read hold what was last written
    /// before this call, and whatever uses any of them afterwards finds what `work` has written.
    ///
    /// # Errors
    /// Those of `work`; or if the device fails, or a tensor is on none.
    fn with_addresses(
        &self,
        order: CudaOrder,
        tensors: &[Arc<dyn CudaTensor>],
        work: CudaWork<'_>,
    ) -> Result<(), CommError>;
}

/// Called with a stream ([`CudaOrder::OnStream`]; `0` with [`CudaOrder::HostSynced`]) and the tensors' addresses.
pub type CudaWork<'a> = Box<dyn FnOnce(u64, &[u64]) -> Result<(), CommError> + Send + 'a>;

/// How a library's use of tensors is put in order with the device's other work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaOrder {
    /// By the stream on which the device works for the calling thread: what is done with the tensors is put on it, and
    /// the host waits for nothing.
    #[default]
    OnStream,
    /// By the host: it waits for the device before, and until the work is done. Slower, and relies on nothing but public
    /// calls.
    HostSynced,
}
