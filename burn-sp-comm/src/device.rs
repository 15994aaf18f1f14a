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
    /// The length of every dimension.
    fn shape(&self) -> Vec<usize>;

    /// The kind of the elements.
    fn dtype(&self) -> DType;

    /// The result of a plan on this tensor's device. `sources` by rank, where the plan needs them; they may be on other
    /// devices. Sums are added up in the order of a tile's sources, in f32 for narrower floats.
    ///
    /// # Errors
    /// If a source is of another kind than this tensor.
    fn assemble(&self, plan: &Plan, sources: &[Option<&Buffer>]) -> Result<Arc<dyn DeviceTensor>, CommError>;
}
