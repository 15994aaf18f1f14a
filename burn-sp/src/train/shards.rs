use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Float, Tensor};
use burn_sp_comm::{Communicator, Parts, Site, raise};

use super::ParamLayouts;
use super::sharded::{flat_layout, flat_part};
use crate::{
    SpDevice, SpKind,
    layout::Layout,
    tensor::{Place, Transition, own_storage},
};

/// Cuts every parameter into flat parts, one a rank of those that hold the same, and leaves this rank its own
/// (stage 3 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
/// 1910.02054; fully sharded data parallelism). Gradients and the optimizer's state are then of parts too.
///
/// The result has the type, names and ids of the module, but its parameters have other shapes: it can be trained, clipped
/// and updated as it is, and [`ParamShards::gather`] makes it one that can compute. `layouts` are those of the whole
/// module; the parts have [their own](ParamShards::layouts). A parameter of fewer elements than ranks stays whole.
///
/// The optimizer must treat elements one by one, as SGD, Adam and AdamW do.
///
/// # Panics
/// If a rank fails meanwhile (in a launched rank: every rank fails with a report).
///
/// # Example
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
/// use burn_sp::train::{checkpoint, shard_parameters};
///
/// let config = LaunchConfig::new(MeshShape::ulysses(2));
/// launch(&config, &Device::flex().autodiff(), |device: SpDevice| {
///     let linear = device.seeded(1, |device| LinearConfig::new(4, 4).init(device));
///     let (linear, shards) = shard_parameters(linear, &device, &ParamLayouts::replicated());
///     assert_eq!(linear.num_params(), (16 + 4) / 2);
///
///     // Gathered here and again in backward, and gone in between.
///     let x = Tensor::<2>::ones([3, 4], device.device());
///     let own = shards.clone();
///     let y = checkpoint(&linear, x, move |linear: &Linear, x| own.gather(linear).forward(x));
///     let grads = y.sum().backward();
///     // This rank's part of the gradient, summed over the ranks.
///     assert_eq!(linear.weight.val().grad(&grads).unwrap().dims(), [8, 1]);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[track_caller]
pub fn shard_parameters<M: Module>(module: M, device: &SpDevice, layouts: &ParamLayouts) -> (M, ParamShards) {
    let mut cutter = Cutter {
        device,
        whole: layouts,
        layouts: layouts.clone(),
        cuts: HashMap::new(),
        site: Site::here(),
    };
    let module = module.map(&mut cutter);
    let shards = ParamShards {
        cuts: Arc::new(cutter.cuts),
        layouts: Arc::new(cutter.layouts),
        whole: Arc::new(layouts.clone()),
    };
    (module, shards)
}

/// The parameters that ranks share out between them; made by [`shard_parameters`]. The default has none.
#[derive(Clone, Debug, Default)]
pub struct ParamShards {
    cuts: Arc<HashMap<ParamId, Cut>>,
    layouts: Arc<ParamLayouts>,
    /// Those of the module before it was cut.
    whole: Arc<ParamLayouts>,
}

/// How a tensor is cut into flat parts, one a rank of those that hold the same.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    /// On this rank, before it was cut.
    pub shape: Vec<usize>,
    /// This rank's elements.
    pub own: Range<usize>,
    gather: Transition,
}

impl Cut {
    /// As evenly as can be over these ranks.
    pub fn new(shape: Vec<usize>, comm: Arc<dyn Communicator>, site: Site) -> Self {
        let parts = Parts::contiguous(shape.iter().product(), comm.size());
        Self {
            shape,
            own: parts.of(comm.rank())[0].clone(),
            gather: Transition {
                from: Place::Shard { dim: 0, parts },
                to: Place::Replicate,
                comm,
                site,
            },
        }
    }

    /// The tensor of whose parts this rank's is one. Collective.
    pub fn whole<const D: usize>(&self, part: Tensor<D>) -> Tensor<D> {
        let whole = Float::transition(part, self.gather.clone());
        whole.reshape(<[usize; D]>::try_from(self.shape.as_slice()).expect("the rank of the parameter"))
    }

    /// This rank's part.
    pub fn part<const D: usize>(&self, whole: Tensor<D>) -> Tensor<D> {
        flat_part(whole, &self.own)
    }
}

impl ParamShards {
    /// The layouts of the parts: what [`sum_gradients`](super::sum_gradients) and
    /// [`clip_by_global_norm`](super::clip_by_global_norm) need to know. The gradient of a part is already the sum over
    /// the ranks.
    pub fn layouts(&self) -> &ParamLayouts {
        &self.layouts
    }

    /// How a parameter was cut, and how it lay before.
    pub(super) fn cut(&self, id: ParamId) -> Option<(&Cut, Option<&Layout>)> {
        self.cuts.get(&id).map(|cut| (cut, self.whole.layout(id)))
    }

    /// The module, or a part of it, with its parameters whole: one all-gather each. Differentiable, the gradients are
    /// reduce-scattered. With no parameter shared out it is the module itself.
    ///
    /// A graph keeps whole what it needs of the parameters. Inside [`checkpoint`](super::checkpoint()) that graph does not
    /// outlive the part: they are gathered for forward, once more for backward, and freed.
    ///
    /// # Panics
    /// If another rank does something else meanwhile (in a launched rank: every rank fails with a report).
    pub fn gather<M: Module>(&self, module: &M) -> M {
        let module = module.clone();
        if self.cuts.is_empty() {
            return module;
        }
        module.map(&mut Gather { cuts: &self.cuts })
    }
}

struct Cutter<'a> {
    device: &'a SpDevice,
    whole: &'a ParamLayouts,
    layouts: ParamLayouts,
    cuts: HashMap<ParamId, Cut>,
    site: Site,
}

impl ModuleMapper for Cutter<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, mesh) = (param.id, self.device.mesh());
        let axes = self.whole.replicated_axes(id, mesh);
        let comm = mesh.group(&axes).unwrap_or_else(|error| raise(error));
        let shape = param.dims();
        let length: usize = shape.iter().product();
        if comm.size() == 1 || length < comm.size() {
            return param;
        }
        let sharded = axes.into_iter().chain(self.whole.sharded_axes(id));
        self.layouts.list(id, flat_layout(length, sharded));
        let cut = Cut::new(shape.to_vec(), comm, self.site);
        let param = param.map(|whole| {
            let tracked = whole.is_require_grad();
            own_storage(cut.part(whole.detach())).set_require_grad(tracked)
        });
        self.cuts.insert(id, cut);
        param
    }
}

struct Gather<'a> {
    cuts: &'a HashMap<ParamId, Cut>,
}

impl ModuleMapper for Gather<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.cuts.get(&param.id) {
            Some(cut) => param.map(|part| cut.whole(part)),
            None => param,
        }
    }
}
