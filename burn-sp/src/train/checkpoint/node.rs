//! The node. Its backward is a backward of its own, on a graph of its own: nothing in it may touch the graph that it is
//! part of, which is locked meanwhile.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, NodeGuard, Ops, OpsKind},
};
use burn::backend::{
    Autodiff, AutodiffBackend, BackendTensor, DispatchKindConversion, DispatchTensor, TensorMetadata,
    ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use super::Carried;
use crate::tensor::SpBackend;

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// What runs now and again in backward.
type Forward<M, I, O> = Arc<dyn Fn(&M, I) -> O + Send + Sync>;

/// Gradients of the inputs, where there are, and of parameters by their nodes in the outer graph.
struct Grads<B: SpBackend> {
    inputs: Vec<Option<FloatTensor<B>>>,
    parameters: Vec<(NodeId, FloatTensor<B>)>,
}

/// Runs the part again and backward through it, from the inputs (and whether their gradients are wanted) and the gradient
/// of the output.
type Again<B> = Box<dyn FnOnce(Vec<(FloatTensor<B>, bool)>, FloatTensor<B>) -> Grads<B> + Send>;

/// Burn wants states to be clones; each runs backward once.
struct State<B: SpBackend> {
    inputs: Vec<FloatTensor<B>>,
    again: Arc<Mutex<Option<Again<B>>>>,
}

impl<B: SpBackend> Clone for State<B> {
    fn clone(&self) -> Self {
        Self {
            inputs: self.inputs.clone(),
            again: self.again.clone(),
        }
    }
}

impl<B: SpBackend> fmt::Debug for State<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("inputs", &self.inputs)
            .finish_non_exhaustive()
    }
}

/// Parents are the inputs and one parameter, which makes the node part of the graph even if no input is.
#[derive(Debug)]
struct Checkpoint;

impl<B: SpBackend, const N: usize> Backward<B, N> for Checkpoint {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let again = ops.state.again.lock().unwrap_or_else(PoisonError::into_inner).take();
        let again = again.expect("a graph is walked back once");
        let shapes: Vec<_> = ops
            .state
            .inputs
            .iter()
            .map(|x| (x.shape(), x.device(), x.dtype()))
            .collect();
        let wanted = ops.parents.iter().map(Option::is_some);
        let found = again(ops.state.inputs.into_iter().zip(wanted).collect(), grad);
        for ((parent, grad), (shape, device, dtype)) in ops.parents.into_iter().zip(found.inputs).zip(shapes) {
            if let Some(parent) = parent {
                let zeros = || crate::tensor::zeros::<B>(shape, &device, dtype);
                grads.register::<B>(parent.id, grad.unwrap_or_else(zeros));
            }
        }
        for (node, grad) in found.parameters {
            grads.register::<B>(node, grad);
        }
    }
}

pub(super) fn record<B, C, M, I, O>(
    module: &M,
    frame: I::Frame,
    tensors: Vec<DispatchTensor>,
    forward: Forward<M, I, O>,
) -> O
where
    B: SpBackend,
    C: CheckpointStrategy,
    M: Module + 'static,
    I: Carried,
    O: Carried,
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    let inputs: Vec<Tracked<B, C>> = tensors.into_iter().map(primitive::<B, C>).collect();
    let parameters = parameters::<B, C, M>(module);
    let first = parameters.first().map(|(_, tensor)| tensor);
    let guards: Vec<NodeGuard> = inputs.iter().chain(first).map(|tensor| tensor.node()).collect();
    let nodes: HashMap<ParamId, NodeId> = parameters.iter().map(|(id, tensor)| (*id, tensor.id())).collect();
    drop(parameters);
    let inputs: Vec<FloatTensor<B>> = inputs.into_iter().map(|tensor| tensor.into_primitive()).collect();

    // The same, but nothing is tracked, so nothing is kept.
    let untracked = inputs
        .iter()
        .cloned()
        .map(<Autodiff<B, C> as AutodiffBackend>::from_inner);
    let quiet = module.clone().no_grad();
    let out = forward(&quiet, I::together(frame.clone(), &mut untracked.map(dispatch::<B, C>)));
    drop(quiet);
    let (out_frame, out) = out.apart();
    let out = single::<B, C>(out);
    assert!(
        !out.is_tracked(),
        "checkpoint: the closure uses tensors of the graph that are neither its input nor the module's parameters, and \
         their gradients would be lost; give them as a part of the input"
    );

    // Leaves of a graph of their own.
    let fresh = module.clone().map(&mut Fresh);
    let again: Again<B> = Box::new(move |inputs, grad| {
        let leaves: Vec<Tracked<B, C>> = inputs
            .into_iter()
            .map(|(input, wanted)| {
                let leaf = <Autodiff<B, C> as AutodiffBackend>::from_inner(input);
                if wanted { leaf.require_grad() } else { leaf }
            })
            .collect();
        let out = forward(
            &fresh,
            I::together(frame, &mut leaves.iter().cloned().map(dispatch::<B, C>)),
        );
        let out = single::<B, C>(out.apart().1);
        if !out.is_tracked() {
            return Grads {
                inputs: leaves.iter().map(|_| None).collect(),
                parameters: Vec::new(),
            };
        }
        let grad = <Autodiff<B, C> as AutodiffBackend>::from_inner(grad);
        let seeded = Autodiff::<B, C>::float_sum(Autodiff::<B, C>::float_mul(out, grad));
        let grads = seeded.backward();
        let of = |(id, tensor): (ParamId, Tracked<B, C>)| Some((*nodes.get(&id)?, tensor.grad(&grads)?));
        Grads {
            inputs: leaves.iter().map(|leaf| leaf.grad(&grads)).collect(),
            parameters: self::parameters::<B, C, M>(&fresh).into_iter().filter_map(of).collect(),
        }
    });
    let state = State {
        inputs,
        again: Arc::new(Mutex::new(Some(again))),
    };
    let out = out.into_primitive();
    let out = match guards.len() {
        1 => finish::<B, C, 1>(guards, state, out),
        2 => finish::<B, C, 2>(guards, state, out),
        3 => finish::<B, C, 3>(guards, state, out),
        4 => finish::<B, C, 4>(guards, state, out),
        5 => finish::<B, C, 5>(guards, state, out),
        6 => finish::<B, C, 6>(guards, state, out),
        7 => finish::<B, C, 7>(guards, state, out),
        8 => finish::<B, C, 8>(guards, state, out),
        count => panic!("checkpoint: {} input tensors, at most 7 can be given", count - 1),
    };
    O::together(out_frame, &mut std::iter::once(dispatch::<B, C>(out)))
}

/// Compute-bound, so that Burn's own gradient checkpointing never runs the collectives within on one rank only.
fn finish<B: SpBackend, C: CheckpointStrategy, const N: usize>(
    guards: Vec<NodeGuard>,
    state: State<B>,
    out: FloatTensor<B>,
) -> Tracked<B, C> {
    let guards: [NodeGuard; N] = guards
        .try_into()
        .unwrap_or_else(|guards: Vec<_>| unreachable!("{} guards for {N} parents", guards.len()));
    match Backward::<B, N>::prepare::<C>(Checkpoint, guards)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(state, out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}

fn primitive<B: SpBackend, C: CheckpointStrategy>(tensor: DispatchTensor) -> Tracked<B, C>
where
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    <DispatchTensor as DispatchKindConversion<Autodiff<B, C>>>::try_into_backend(tensor)
        .unwrap_or_else(|error| panic!("checkpoint: all tensors must be on one autodiff device: {error}"))
        .float()
}

fn dispatch<B: SpBackend, C: CheckpointStrategy>(tensor: Tracked<B, C>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    <DispatchTensor as DispatchKindConversion<Autodiff<B, C>>>::from_backend(BackendTensor::Float(tensor))
}

fn single<B: SpBackend, C: CheckpointStrategy>(mut tensors: Vec<DispatchTensor>) -> Tracked<B, C>
where
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    match (tensors.pop(), tensors.pop()) {
        (Some(out), None) => primitive::<B, C>(out),
        _ => panic!("checkpoint: one tensor must come out; of several, give each a part of its own"),
    }
}

/// The tracked float parameters, in the module's order.
fn parameters<B, C, M>(module: &M) -> Vec<(ParamId, Tracked<B, C>)>
where
    B: SpBackend,
    C: CheckpointStrategy,
    M: Module,
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    struct Visit<B: SpBackend, C: CheckpointStrategy>(Vec<(ParamId, Tracked<B, C>)>);

    impl<B: SpBackend, C: CheckpointStrategy> ModuleVisitor for Visit<B, C>
    where
        DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
    {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0.push((param.id, primitive::<B, C>(param.val().into_dispatch())));
            }
        }
    }

    let mut visit = Visit(Vec::new());
    module.visit(&mut visit);
    visit.0
}

/// The parameters, each a leaf of its own.
struct Fresh;

impl ModuleMapper for Fresh {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let tracked = tensor.is_require_grad();
            let tensor = tensor.detach();
            if tracked { tensor.require_grad() } else { tensor }
        })
    }
}
