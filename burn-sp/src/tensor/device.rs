use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use super::{SpKind, SpTensor};
use crate::initialize;
use crate::layout::{Axis, Layout, Mesh, Split};

/// A Burn [`Device`] with a place on a mesh: what a rank's code gets from the launcher.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_sp::prelude::*;
///
/// let held = launch(&LaunchConfig::new(MeshShape::ring(2)), &Device::flex(), |device: SpDevice| {
///     let batch = Tensor::<2, Int>::from_ints([[10, 11, 12, 13]], device.device());
///     // Zigzag: rank 0 has the first token and the last.
///     let tokens = device.distribute_tokens(batch);
///     assert_eq!(tokens.global_shape(), [1, 4]);
///     tokens.into_local().into_data().iter::<i64>().collect::<Vec<_>>()
/// })?;
/// assert_eq!(held, [[10, 13], [11, 12]]);
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SpDevice {
    device: Device,
    mesh: Arc<Mesh>,
    ring_split: Split,
}

/// Runs `init` with the device's generator seeded, and no one else drawing: Burn's generators belong to the process, and
/// ranks may be threads of one. The same seed gives the same random tensors, in a module the same parameters: they are
/// all drawn before this returns, not when each is first used, as Burn would.
///
/// # Panics
/// If the device fails.
pub fn seeded<M: Module>(device: &Device, seed: u64, init: impl FnOnce(&Device) -> M) -> M {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let _alone = GENERATOR.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    device.seed(seed);
    let module = init(device);
    initialize(&module);
    // Under operator fusion, what is only queued would be drawn when it runs.
    if let Err(error) = device.sync() {
        panic!("seeded: the parameters could not be drawn: {error}");
    }
    module
}

impl SpDevice {
    /// Decorates a device.
    pub fn new(device: Device, mesh: Arc<Mesh>) -> Self {
        Self {
            device,
            mesh,
            ring_split: Split::Zigzag,
        }
    }

    /// With another split of tokens over the ring axis than zigzag, which balances a causal mask:
    /// [`Split::Contiguous`] for a full one, say. It holds for sequences of one length if it is explicit.
    pub fn with_ring_split(self, ring_split: Split) -> Self {
        Self { ring_split, ..self }
    }

    /// The plain device, for modules and tensors without a layout.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The mesh, as this rank sees it.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// This rank, counted over the whole mesh.
    pub fn rank(&self) -> usize {
        self.mesh.rank()
    }

    /// [`seeded`] on this device: every rank that calls it with the same seed gets the same random tensors.
    ///
    /// # Panics
    /// If the device fails.
    pub fn seeded<M: Module>(&self, seed: u64, init: impl FnOnce(&Device) -> M) -> M {
        seeded(&self.device, seed, init)
    }

    /// Takes this rank's slice of a tensor that every rank holds whole. Differentiable: the tensor's gradient is
    /// partial, each rank's share of it lies where its slice was.
    ///
    /// # Shapes
    /// - `whole`: that of the layout; the result is of the same, of which this rank holds its slice
    ///
    /// # Panics
    /// If the shape is not the layout's global shape, or the layout is partial.
    #[track_caller]
    pub fn distribute<const D: usize, K: SpKind>(&self, whole: Tensor<D, K>, layout: &Layout) -> SpTensor<D, K> {
        assert!(
            layout.partial_axes().is_empty(),
            "distribute: a whole value cannot become {layout}; distribute it without the partial axes and redistribute to Partial"
        );
        assert!(
            whole.dims() == layout.shape(),
            "distribute: the tensor is {:?}, the layout {layout}; give the whole tensor's shape to the layout",
            whole.dims()
        );
        let mut tensor = SpTensor::replicated(whole, self);
        for dim in 0..D {
            for (axis, split) in layout.shards(dim) {
                tensor = tensor.shard(*axis, dim, split.clone());
            }
        }
        tensor
    }

    /// The layout of a batch of token sequences `[batch, tokens, ...]` on this mesh: samples over `dp`, tokens over
    /// `ring` (by the [ring split](Self::with_ring_split)) and inside it over `ulysses`.
    ///
    /// # Panics
    /// If the shape has fewer than two dimensions.
    pub fn sequence_layout(&self, shape: impl Into<Vec<usize>>) -> Layout {
        Layout::replicated(shape)
            .shard(0, Axis::Dp, Split::Contiguous)
            .shard(1, Axis::Ring, self.ring_split.clone())
            .shard(1, Axis::Ulysses, Split::Contiguous)
    }

    /// Takes this rank's samples and tokens of a global batch; see [`sequence_layout`](Self::sequence_layout).
    ///
    /// # Shapes
    /// - `batch`: `[batch, tokens]`, whole on every rank, and so is the result
    #[track_caller]
    pub fn distribute_tokens(&self, batch: Tensor<2, Int>) -> SpTensor<2, Int> {
        let layout = self.sequence_layout(batch.dims());
        self.distribute(batch, &layout)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::nn::{Linear, LinearConfig};

    use super::*;

    /// Burn draws a parameter at its first use: someone else's seed in between must not matter.
    #[test]
    fn a_seeded_module_is_drawn_at_once() {
        let device = Device::flex();
        let model = || seeded(&device, 3, |device| LinearConfig::new(4, 5).init(device));
        let weights = |model: &Linear| model.weight.val().into_data();
        let early = model();
        let other = seeded(&device, 99, |device| LinearConfig::new(4, 5).init(device));
        assert_ne!(weights(&other), weights(&early));
        assert_eq!(weights(&early), weights(&model()));
    }
}
