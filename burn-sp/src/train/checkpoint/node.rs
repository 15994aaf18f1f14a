//! The node. Its backward is a backward of its own, on a graph of its own: nothing in it may touch the graph that it is
//! part of, which is locked meanwhile.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
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
use burn::tensor::{Float, Tensor};

use super::{Carried, Forward, Keep, Piece, TOKENS, kept::Kept};
use crate::tensor::{SpBackend, at, select, zeros};

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Gradients of the inputs, where there are, and of parameters by their nodes in the outer graph.
struct Grads<B: SpBackend> {
    inputs: Vec<Option<FloatTensor<B>>>,
    parameters: Vec<(NodeId, FloatTensor<B>)>,
}

impl<B: SpBackend> Grads<B> {
    /// Of so many inputs, none yet.
    fn none(inputs: usize) -> Self {
        Self {
            inputs: std::iter::repeat_with(|| None).take(inputs).collect(),
            parameters: Vec::new(),
        }
    }

    /// Adds those of a piece of the tokens, where inputs have so many.
    fn add<F>(&mut self, found: Self, piece: &Piece<F>, tokens: usize) {
        for (sum, grad) in self.inputs.iter_mut().zip(found.inputs) {
            if let Some(grad) = grad {
                *sum = Some(piece.join::<B>(sum.take(), grad, tokens));
            }
        }
        for (node, grad) in found.parameters {
            // Out of the list, so that nobody else holds it and it can be added to in place.
            let before = self.parameters.iter().position(|(other, _)| *other == node);
            let sum = match before.map(|index| self.parameters.swap_remove(index)) {
                Some((_, sum)) => B::float_add(sum, grad),
                None => grad,
            };
            self.parameters.push((node, sum));
        }
    }
}

/// Runs the part again and backward through it, from the inputs (and whether their gradients are wanted) and the gradient
/// of the output.
type Again<B> = Box<dyn FnOnce(Vec<(FloatTensor<B>, bool)>, FloatTensor<B>) -> Grads<B> + Send>;

/// Burn wants states to be clones; each runs backward once.
struct State<B: SpBackend> {
    inputs: Vec<Kept<B>>,
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

/// Parents are the inputs, the parameters that are themselves computed, and one that is not, which makes the node part of
/// the graph even if nothing else is. Leaves need not be parents: nothing runs after them.
#[derive(Debug)]
struct Checkpoint;

impl<B: SpBackend, const N: usize> Backward<B, N> for Checkpoint {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let again = ops.state.again.lock().unwrap_or_else(PoisonError::into_inner).take();
        let again = again.expect("a graph is walked back once");
        let inputs: Vec<FloatTensor<B>> = ops.state.inputs.into_iter().map(Kept::back).collect();
        let shapes: Vec<_> = inputs.iter().map(|x| (x.shape(), x.device(), x.dtype())).collect();
        let wanted = ops.parents.iter().map(Option::is_some);
        let found = again(inputs.into_iter().zip(wanted).collect(), grad);
        for ((parent, grad), (shape, device, dtype)) in ops.parents.into_iter().zip(found.inputs).zip(shapes) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad.unwrap_or_else(|| zeros::<B>(shape, &device, dtype)));
            }
        }
        for (node, grad) in found.parameters {
            grads.register::<B>(node, grad);
        }
    }
}

/// The pieces run one after the other; there is one, without a range, if the input is not cut. Returns what frames the
/// output of each, and the output of all.
pub(super) fn record<B, C, M, I, O>(
    module: &M,
    pieces: Vec<Piece<I::Frame>>,
    tensors: Vec<DispatchTensor>,
    forward: Forward<M, I, O>,
    keep: Keep,
) -> (Vec<O::Frame>, DispatchTensor)
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
    let (leaves, computed): (Vec<_>, Vec<_>) = parameters.iter().partition(|(_, tensor)| is_leaf::<B, C>(tensor));
    let parents = computed.iter().chain(leaves.first()).map(|(_, tensor)| tensor.node());
    let guards: Vec<NodeGuard> = inputs.iter().map(|tensor| tensor.node()).chain(parents).collect();
    let computed: HashSet<ParamId> = computed.iter().map(|(id, _)| *id).collect();
    let nodes: HashMap<ParamId, NodeId> = parameters.iter().map(|(id, tensor)| (*id, tensor.id())).collect();
    drop(parameters);
    let inputs: Vec<FloatTensor<B>> = inputs.into_iter().map(|tensor| tensor.into_primitive()).collect();
    let all_tokens = inputs.first().map_or(0, tokens_of);

    // The same, but nothing is tracked, so nothing is kept.
    let quiet = module.clone().no_grad();
    let (mut out_frames, mut out) = (Vec::new(), None);
    for piece in &pieces {
        let untracked = inputs
            .iter()
            .map(|input| <Autodiff<B, C> as AutodiffBackend>::from_inner(piece.of::<B>(input)));
        let made = forward(
            &quiet,
            I::together(piece.frame.clone(), &mut untracked.map(dispatch::<B, C>)),
        );
        let (frame, made) = made.apart();
        let made = single::<B, C>(made);
        assert!(
            !made.is_tracked(),
            "checkpoint: the closure uses tensors of the graph that are neither its input nor the module's parameters, \
             and their gradients would be lost; give them as a part of the input"
        );
        out_frames.push(frame);
        out = Some(piece.join::<B>(out, made.into_primitive(), all_tokens));
    }
    drop(quiet);
    let out = out.expect("there is a piece");

    // Leaves of a graph of their own.
    let fresh = module.clone().map(&mut Fresh::<B, C>(PhantomData));
    let again: Again<B> = Box::new(move |inputs, grad| {
        let mut sum = Grads::none(inputs.len());
        for piece in pieces {
            let leaves: Vec<Tracked<B, C>> = inputs
                .iter()
                .map(|(input, wanted)| {
                    let leaf = <Autodiff<B, C> as AutodiffBackend>::from_inner(piece.of::<B>(input));
                    if *wanted { leaf.require_grad() } else { leaf }
                })
                .collect();
            let found = through::<B, C, M, I, O>(
                &fresh,
                &leaves,
                piece.frame.clone(),
                piece.of::<B>(&grad),
                &forward,
                &nodes,
            );
            sum.add(found, &piece, all_tokens);
        }
        // A node that is yet to run finds a gradient, always.
        for (id, tensor) in self::parameters::<B, C, M>(&fresh) {
            let missing = |node: &NodeId| sum.parameters.iter().all(|(other, _)| other != node);
            if let Some(node) = nodes.get(&id).filter(|node| computed.contains(&id) && missing(node)) {
                let zeros = zeros::<B>(tensor.shape(), &tensor.device(), tensor.dtype());
                sum.parameters.push((*node, zeros));
            }
        }
        sum
    });
    let state = State {
        inputs: inputs.into_iter().map(|input| Kept::new(input, keep)).collect(),
        again: Arc::new(Mutex::new(Some(again))),
    };
    macro_rules! finish {
        ($($count:literal)*) => {
            match guards.len() {
                $($count => finish::<B, C, $count>(guards, state, out),)*
                count => panic!(
                    "checkpoint: {count} tensors, inputs and parameters that are themselves computed; at most 24 can be given"
                ),
            }
        };
    }
    let out = finish!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24);
    (out_frames, dispatch::<B, C>(out))
}

/// Forward through a piece, and backward.
fn through<B, C, M, I, O>(
    fresh: &M,
    leaves: &[Tracked<B, C>],
    frame: I::Frame,
    grad: FloatTensor<B>,
    forward: &Forward<M, I, O>,
    nodes: &HashMap<ParamId, NodeId>,
) -> Grads<B>
where
    B: SpBackend,
    C: CheckpointStrategy,
    M: Module,
    I: Carried,
    O: Carried,
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    let out = forward(
        fresh,
        I::together(frame, &mut leaves.iter().cloned().map(dispatch::<B, C>)),
    );
    let out = single::<B, C>(out.apart().1);
    if !out.is_tracked() {
        return Grads::none(leaves.len());
    }
    let grad = <Autodiff<B, C> as AutodiffBackend>::from_inner(grad);
    let seeded = Autodiff::<B, C>::float_sum(Autodiff::<B, C>::float_mul(out, grad));
    let grads = seeded.backward();
    let of = |(id, tensor): (ParamId, Tracked<B, C>)| Some((*nodes.get(&id)?, tensor.grad(&grads)?));
    Grads {
        inputs: leaves.iter().map(|leaf| leaf.grad(&grads)).collect(),
        parameters: parameters::<B, C, M>(fresh).into_iter().filter_map(of).collect(),
    }
}

impl<F> Piece<F> {
    /// The piece of a tensor of all tokens.
    fn of<B: SpBackend>(&self, whole: &FloatTensor<B>) -> FloatTensor<B> {
        match &self.range {
            Some(range) => select::<B, Float>(whole.clone(), TOKENS, std::slice::from_ref(range)),
            None => whole.clone(),
        }
    }

    /// Puts the piece of a tensor where it belongs; the first one makes the whole, of so many tokens.
    fn join<B: SpBackend>(
        &self,
        whole: Option<FloatTensor<B>>,
        piece: FloatTensor<B>,
        tokens: usize,
    ) -> FloatTensor<B> {
        let Some(range) = &self.range else { return piece };
        let whole = whole.unwrap_or_else(|| {
            let mut shape = piece.shape();
            shape[TOKENS] = tokens;
            zeros::<B>(shape, &piece.device(), piece.dtype())
        });
        if piece.shape().num_elements() == 0 {
            return whole;
        }
        let slices = at(&whole, TOKENS, range.clone());
        B::float_slice_assign(whole, &slices, piece)
    }
}

/// How many tokens an input has, if it has any.
fn tokens_of(input: &impl TensorMetadata) -> usize {
    input.shape().as_slice().get(TOKENS).copied().unwrap_or(0)
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

/// Whether a tracked tensor is where gradients end.
fn is_leaf<B: SpBackend, C: CheckpointStrategy>(tensor: &Tracked<B, C>) -> bool {
    Autodiff::<B, C>::float_is_require_grad(tensor)
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
            let tensor = primitive::<B, C>(param.val().into_dispatch());
            if tensor.is_tracked() {
                self.0.push((param.id, tensor));
            }
        }
    }

    let mut visit = Visit(Vec::new());
    module.visit(&mut visit);
    visit.0
}

/// The parameters, each a leaf of its own.
struct Fresh<B, C>(PhantomData<(B, C)>);

impl<B: SpBackend, C: CheckpointStrategy> ModuleMapper for Fresh<B, C>
where
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let tracked = primitive::<B, C>(tensor.clone().into_dispatch()).is_tracked();
            let tensor = tensor.detach();
            if tracked { tensor.require_grad() } else { tensor }
        })
    }
}
