use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Float, Tensor};
use burn_sp_comm::{Parts, Site, raise};

use super::gradients::{Bucket, Give, apart, buckets};
use super::{ParamLayouts, clip_by_global_norm};
use crate::{
    SpKind,
    layout::{Axis, Layout, Mesh, Split},
    tensor::{Place, Transition},
};

/// An optimizer whose state is shared out over all ranks that hold the same parameter, over sequence axes as well as
/// `dp` (stage 1 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
/// 1910.02054).
///
/// Of each parameter a rank gets the summed gradient of its own part, updates that part, and the parts are gathered:
/// as many bytes travel as in [`sum_gradients`](super::sum_gradients), and a rank keeps `1 / ranks` of the state. Parts are cut without regard to
/// a parameter's shape, so the optimizer must treat elements one by one, as SGD, Adam and AdamW do; one that looks at
/// rows and columns (Muon, Adafactor) does not fit.
///
/// # Example
/// ```
/// use burn::nn::{Initializer, LinearConfig};
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
/// use burn_sp::train::ShardedOptimizer;
///
/// let config = LaunchConfig::new(MeshShape::ulysses(2));
/// launch(&config, &Device::flex().autodiff(), |device: SpDevice| {
///     let ones = LinearConfig::new(2, 1).with_bias(false).with_initializer(Initializer::Ones);
///     let linear = device.seeded(1, |device| ones.init(device));
///     let mut optimizer = ShardedOptimizer::new(SgdConfig::new().init());
///
///     // The mean of `3 w0 + 4 w1` over 4 tokens.
///     let tokens = Tensor::<1>::from_floats([3.0, 4.0], device.device()).reshape([1, 1, 2]).expand([1, 4, 2]);
///     let tokens = device.distribute(tokens, &device.sequence_layout([1, 4, 2]));
///     let loss = LossShare::mean(tokens.tokenwise(|t| linear.forward(t)));
///     let grads = GradientsParams::from_grads(loss.backward(), &linear);
///     let layouts = ParamLayouts::replicated();
///     let (linear, norm) = optimizer.step(0.25, linear, grads, None, &layouts, device.mesh());
///     // Each rank has updated one of the two weights.
///     assert_eq!(norm, 5.0);
///     assert_eq!(linear.weight.val().into_data().to_vec::<f32>().unwrap(), [0.25, 0.0]);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
pub struct ShardedOptimizer {
    optimizer: ModuleOptimizer,
}

/// A rank's part of a flat parameter.
type Own = HashMap<ParamId, Range<usize>>;

/// Parameters that travel together: where each one's part lies among the parts of all.
struct Travel {
    axes: Vec<Axis>,
    ids: Vec<(ParamId, usize)>,
    parts: Parts,
}

impl ShardedOptimizer {
    /// Shares out the state of this optimizer, which must have none, or that of this rank's parts.
    pub fn new(optimizer: ModuleOptimizer) -> Self {
        Self { optimizer }
    }

    /// Sums the gradients of all ranks, clips them by their global norm if `max_norm` is given, and updates the module;
    /// returns it and the norm before clipping. Collective. It does what [`sum_gradients`](super::sum_gradients),
    /// [`clip_by_global_norm`] and the optimizer's own step do together.
    ///
    /// # Panics
    /// If ranks have gradients of different parameters (in a launched rank: every rank fails with a report).
    #[track_caller]
    pub fn step<M: Module>(
        &mut self,
        lr: f64,
        module: M,
        mut grads: GradientsParams,
        max_norm: Option<f64>,
        layouts: &ParamLayouts,
        mesh: &Mesh,
    ) -> (M, f64) {
        let site = Site::here();
        let _span = tracing::trace_span!("optimizer").entered();
        let (mut own, mut part_layouts, mut travels) = (Own::new(), layouts.clone(), Vec::new());
        let mut summed: HashMap<ParamId, Tensor<1>> = HashMap::new();
        for Bucket { axes, members } in buckets(&module, &mut grads, layouts, mesh) {
            let comm = mesh.group(&axes).unwrap_or_else(|error| raise(error));
            let (rank, ids) = (
                comm.rank(),
                members.iter().map(|(id, grad)| (*id, grad.dims()[0])).collect(),
            );
            let travel = Travel::new(axes, ids, comm.size());
            let terms = Tensor::cat(members.into_iter().map(|(_, grad)| grad).collect(), 0);
            let sum = Transition {
                from: Place::Partial,
                to: travel.shard(),
                comm,
                site,
            };
            // A parameter of fewer elements than ranks has no part on some.
            let lengths = travel.own(rank).map(|(id, range)| (id, range.len()));
            summed.extend(apart(Float::transition(terms, sum), lengths));
            own.extend(travel.own(rank));
            for (id, length) in &travel.ids {
                let axes = travel.axes.iter().copied().chain(layouts.sharded_axes(*id));
                part_layouts.list(*id, flat_layout(*length, axes));
            }
            travels.push(travel);
        }

        // The module with each parameter cut down to the rank's part: the optimizer sees the same names and ids.
        let parts = module.clone().map(&mut Cut { own: &own });
        parts.visit(&mut Give {
            grads: &mut grads,
            summed,
        });
        let (grads, norm) = clip_by_global_norm(&parts, grads, max_norm, &part_layouts, mesh);
        let parts = self.optimizer.step(lr, parts, grads);

        let mut flat = Flatten(HashMap::new());
        parts.visit(&mut flat);
        drop(parts);
        let mut updated = HashMap::new();
        for travel in travels {
            let own = travel
                .ids
                .iter()
                .map(|(id, _)| flat.0.remove(id).expect("every part was cut from a parameter"));
            let gather = Transition {
                from: travel.shard(),
                to: Place::Replicate,
                comm: mesh.group(&travel.axes).unwrap_or_else(|error| raise(error)),
                site,
            };
            let whole = Float::transition(Tensor::cat(own.collect(), 0), gather);
            updated.extend(apart(whole, travel.ids));
        }
        // Those that no other rank holds.
        updated.extend(flat.0);
        (module.map(&mut Restore { updated }), norm)
    }

    /// The optimizer, with the state of this rank's parts.
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// [`inner`](Self::inner), by value.
    pub fn into_inner(self) -> ModuleOptimizer {
        self.optimizer
    }
}

impl Travel {
    fn new(axes: Vec<Axis>, ids: Vec<(ParamId, usize)>, ranks: usize) -> Self {
        let of = |rank: usize| {
            let mut start = 0;
            let part = ids.iter().map(|(_, length)| {
                let range = Parts::contiguous(*length, ranks).of(rank)[0].clone();
                start += length;
                range.start + start - length..range.end + start - length
            });
            part.collect()
        };
        let parts = Parts::new((0..ranks).map(of).collect());
        Self { axes, ids, parts }
    }

    fn shard(&self) -> Place {
        Place::Shard {
            dim: 0,
            parts: self.parts.clone(),
        }
    }

    /// A rank's part of each parameter, within the parameter.
    fn own(&self, rank: usize) -> impl Iterator<Item = (ParamId, Range<usize>)> {
        let mut start = 0;
        self.ids
            .iter()
            .zip(self.parts.of(rank))
            .map(move |((id, length), range)| {
                start += length;
                (*id, range.start + length - start..range.end + length - start)
            })
    }
}

/// As much as clipping asks of a layout: the axes that shard it.
pub(super) fn flat_layout(length: usize, axes: impl Iterator<Item = Axis>) -> Layout {
    axes.fold(Layout::replicated([length]), |layout, axis| {
        layout.shard(0, axis, Split::Contiguous)
    })
}

/// A range of a parameter's elements, flat, in as many dimensions as the parameter has.
pub(super) fn flat_part<const D: usize>(tensor: Tensor<D>, range: &Range<usize>) -> Tensor<D> {
    let mut shape = [1; D];
    shape[0] = range.len();
    if range.is_empty() {
        return Tensor::empty(shape, (&tensor.device(), tensor.dtype()));
    }
    let length = tensor.dims().iter().product::<usize>();
    tensor
        .reshape([length])
        .narrow(0, range.start, range.len())
        .reshape(shape)
}

struct Cut<'a> {
    own: &'a Own,
}

impl ModuleMapper for Cut<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let own = self.own.get(&param.id);
        param.map(|tensor| {
            let tensor = tensor.inner();
            let part = match own {
                Some(range) => flat_part(tensor, range),
                None => tensor,
            };
            // Burn's optimizers update autodiff tensors only.
            part.autodiff()
        })
    }
}

struct Flatten(HashMap<ParamId, Tensor<1>>);

impl ModuleVisitor for Flatten {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val().inner();
        let flat = match tensor.dims().iter().product::<usize>() {
            // Burn's `reshape` reads a length of 0 as "as it was".
            0 => Tensor::empty([0], (&tensor.device(), tensor.dtype())),
            length => tensor.reshape([length]),
        };
        self.0.insert(param.id, flat);
    }
}

struct Restore {
    updated: HashMap<ParamId, Tensor<1>>,
}

impl ModuleMapper for Restore {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let updated = self.updated.remove(&param.id).filter(|updated| updated.dims()[0] > 0);
        param.map(|old| {
            let Some(updated) = updated else { return old };
            let new = updated.reshape(old.dims());
            // As the optimizer does it: a leaf again, under the strategy it had.
            let new = match old.gradient_checkpointing_strategy() {
                Some(strategy) => new.autodiff().with_gradient_checkpointing_strategy(strategy),
                None => new,
            };
            if old.is_require_grad() { new.require_grad() } else { new }
        })
    }
}
