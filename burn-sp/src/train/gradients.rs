use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Float, Tensor};
use burn_sp_comm::{Site, raise};

use super::ParamLayouts;
use crate::{
    SpKind,
    layout::{Axis, Mesh},
    tensor::{Place, Transition},
};

/// Elements of one message; a bucket holds at least one parameter.
const BUCKET: usize = 1 << 24;

/// Sums each parameter's gradient over every axis on which the parameter is replicated, once, in few large messages.
///
/// Call it once a step, after the last micro-step's backward. Gradients are sums, never means: the loss share has been
/// divided by the global count already. Every rank ends with the same bits. Collective.
///
/// # Panics
/// If ranks have gradients of different parameters (in a launched rank: every rank fails with a report).
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
///
/// // The mean of `w t` over the tokens `t`: its gradient is the mean of the tokens, on any mesh.
/// let config = LaunchConfig::new(MeshShape::ulysses(2));
/// let grads = launch(&config, &Device::flex().autodiff(), |device: SpDevice| {
///     let linear = device.seeded(1, |device| LinearConfig::new(1, 1).with_bias(false).init(device));
///     let tokens = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 6.0], device.device()).reshape([1, 4, 1]);
///     let tokens = device.distribute(tokens, &device.sequence_layout([1, 4, 1]));
///     let loss = LossShare::mean(tokens.tokenwise(|t| linear.forward(t)));
///     let grads = GradientsParams::from_grads(loss.backward(), &linear);
///     let grads = sum_gradients(&linear, grads, &ParamLayouts::replicated(), device.mesh());
///     grads.get::<2>(linear.weight.id).unwrap().into_scalar::<f32>()
/// })?;
/// assert_eq!(grads, [3.0, 3.0]);
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[track_caller]
pub fn sum_gradients<M: Module>(
    module: &M,
    mut grads: GradientsParams,
    layouts: &ParamLayouts,
    mesh: &Mesh,
) -> GradientsParams {
    let site = Site::here();
    let _span = tracing::trace_span!("gradient sum").entered();
    let mut summed: HashMap<ParamId, Tensor<1>> = HashMap::new();
    for Bucket { axes, members } in buckets(module, &mut grads, layouts, mesh) {
        let lengths: Vec<(ParamId, usize)> = members.iter().map(|(id, grad)| (*id, grad.dims()[0])).collect();
        let terms = Tensor::cat(members.into_iter().map(|(_, grad)| grad).collect(), 0);
        let sum = Transition {
            from: Place::Partial,
            to: Place::Replicate,
            comm: mesh.group(&axes).unwrap_or_else(|error| raise(error)),
            site,
        };
        summed.extend(apart(Float::transition(terms, sum), lengths));
    }
    module.visit(&mut Give {
        grads: &mut grads,
        summed,
    });
    grads
}

type Flat = (ParamId, Tensor<1>);

/// Gradients that travel together: flat, of parameters that are replicated over the same axes.
pub(super) struct Bucket {
    pub axes: Vec<Axis>,
    pub members: Vec<Flat>,
}

/// Takes the gradients of all parameters that are replicated over some axes with more than one rank, in an order that is
/// the same on all ranks.
pub(super) fn buckets<M: Module>(
    module: &M,
    grads: &mut GradientsParams,
    layouts: &ParamLayouts,
    mesh: &Mesh,
) -> Vec<Bucket> {
    let mut take = Take {
        grads,
        taken: Vec::new(),
        layouts,
        mesh,
    };
    module.visit(&mut take);
    let groups = grouped(take.taken).into_iter();
    let bucket = |axes: Vec<Axis>| {
        move |members| Bucket {
            axes: axes.clone(),
            members,
        }
    };
    groups
        .flat_map(|((axes, _), members)| filled(members).into_iter().map(bucket(axes)))
        .collect()
}

/// By the axes to sum over and the dtype, each group in the module's order.
fn grouped(taken: Vec<(Vec<Axis>, Flat)>) -> BTreeMap<(Vec<Axis>, &'static str), Vec<Flat>> {
    let mut groups: BTreeMap<_, Vec<Flat>> = BTreeMap::new();
    for (axes, flat) in taken {
        let dtype: DType = flat.1.dtype();
        groups.entry((axes, dtype.name())).or_default().push(flat);
    }
    groups
}

fn filled(members: Vec<Flat>) -> Vec<Vec<Flat>> {
    let mut buckets: Vec<Vec<Flat>> = Vec::new();
    let mut filled = BUCKET;
    for member in members {
        let length = member.1.dims()[0];
        if filled + length > BUCKET {
            buckets.push(Vec::new());
            filled = 0;
        }
        filled += length;
        buckets.last_mut().expect("a bucket was just opened").push(member);
    }
    buckets
}

struct Take<'a> {
    grads: &'a mut GradientsParams,
    taken: Vec<(Vec<Axis>, Flat)>,
    layouts: &'a ParamLayouts,
    mesh: &'a Mesh,
}

impl ModuleVisitor for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let axes = self.layouts.replicated_axes(param.id, self.mesh);
        let length = param.dims().iter().product::<usize>();
        // Nothing is left to sum of a parameter whose part on these ranks is empty.
        if axes.is_empty() || length == 0 {
            return;
        }
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.taken.push((axes, (param.id, grad.reshape([length]))));
        }
    }
}

/// What was joined to travel, by parameter again; a length may be 0, which has no tensor.
pub(super) fn apart(
    joined: Tensor<1>,
    lengths: impl IntoIterator<Item = (ParamId, usize)>,
) -> Vec<(ParamId, Tensor<1>)> {
    let mut start = 0;
    let part = |(id, length): (ParamId, usize)| {
        start += length;
        (length > 0).then(|| (id, joined.clone().narrow(0, start - length, length)))
    };
    lengths.into_iter().filter_map(part).collect()
}

/// Registers flat gradients in the shapes of their parameters.
pub(super) struct Give<'a> {
    pub grads: &'a mut GradientsParams,
    pub summed: HashMap<ParamId, Tensor<1>>,
}

impl ModuleVisitor for Give<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(sum) = self.summed.remove(&param.id) {
            self.grads.register(param.id, sum.reshape(param.dims()));
        }
    }
}
