//! Activation checkpointing: a part of a model keeps its input only, and runs again in backward.

mod carried;
mod kept;
mod node;
mod tiled;

pub use carried::Carried;
pub use kept::Keep;
pub use tiled::tiled;

use std::ops::Range;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::{Autodiff, DispatchKindConversion, DispatchTensor};
use burn::module::Module;

use crate::tensor::SpBackend;

/// Runs a part of a model, of which the graph keeps the input alone: backward runs it again, and then backward through it
/// (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). Outputs and gradients are those of
/// `forward(module, input)`.
///
/// `forward` must do the same both times. Collectives repeat in the same order on every rank. Dropout by
/// [`DropoutKey`](crate::nn::DropoutKey) draws the same mask again; Burn's own `Dropout` would draw another.
///
/// Without a graph to keep, on a plain device, it just runs.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::train::checkpoint;
///
/// let device = Device::flex().autodiff();
/// let linear = LinearConfig::new(3, 3).init(&device);
/// let x = Tensor::<2>::ones([2, 3], &device).require_grad();
/// let y = checkpoint(&linear, x.clone(), |linear, x: Tensor<2>| linear.forward(x).exp());
/// let grads = y.sum().backward();
/// assert_eq!(x.grad(&grads).unwrap().dims(), [2, 3]);
/// assert_eq!(linear.weight.val().grad(&grads).unwrap().dims(), [3, 3]);
/// ```
///
/// # Panics
/// If `forward` uses tracked tensors beside `input` and the module's parameters: their gradients would be lost. Give them
/// as a part of `input`, which may be a tuple.
pub fn checkpoint<M, I, O>(module: &M, input: I, forward: impl Fn(&M, I) -> O + Send + Sync + 'static) -> O
where
    M: Module + 'static,
    I: Carried,
    O: Carried,
{
    checkpoint_with(Keep::Device, module, input, forward)
}

/// [`checkpoint`], of which the input waits for backward where `keep` says.
///
/// # Panics
/// As [`checkpoint`].
pub fn checkpoint_with<M, I, O>(
    keep: Keep,
    module: &M,
    input: I,
    forward: impl Fn(&M, I) -> O + Send + Sync + 'static,
) -> O
where
    M: Module + 'static,
    I: Carried,
    O: Carried,
{
    let (frame, tensors) = input.apart();
    let forward: Forward<M, I, O> = Arc::new(forward);
    let whole = vec![Piece {
        frame: frame.clone(),
        range: None,
    }];
    match record(module, whole, tensors, &forward, keep) {
        Ok((frames, out)) => {
            let frame = frames.into_iter().next().expect("of the one piece");
            O::together(frame, &mut std::iter::once(out))
        }
        Err(tensors) => forward(module, I::together(frame, &mut tensors.into_iter())),
    }
}

/// The dimension that is cut into pieces: the tokens of `[batch, tokens, ...]`.
const TOKENS: usize = 1;

/// What runs now and again in backward.
type Forward<M, I, O> = Arc<dyn Fn(&M, I) -> O + Send + Sync>;

/// Some of the tokens of the input, or all of it, with what frames it.
struct Piece<F> {
    frame: F,
    range: Option<Range<usize>>,
}

/// What a node makes: what frames the output of each piece, and the output of all.
type Made<O> = (Vec<<O as Carried>::Frame>, DispatchTensor);

/// The node of the graph, on the backend that the tensors are on; the tensors, if that keeps no graph. It takes them, so
/// that what it moves elsewhere is not held here.
fn record<M, I, O>(
    module: &M,
    pieces: Vec<Piece<I::Frame>>,
    tensors: Vec<DispatchTensor>,
    forward: &Forward<M, I, O>,
    keep: Keep,
) -> Result<Made<O>, Vec<DispatchTensor>>
where
    M: Module + 'static,
    I: Carried,
    O: Carried,
{
    macro_rules! try_on {
        ($backend:ty, $strategy:ty) => {
            if tensors.iter().any(is_on::<$backend, $strategy>) {
                return Ok(node::record::<$backend, $strategy, M, I, O>(
                    module,
                    pieces,
                    tensors,
                    forward.clone(),
                    keep,
                ));
            }
        };
    }
    #[cfg(feature = "flex")]
    {
        try_on!(burn::backend::Flex, NoCheckpointing);
        try_on!(burn::backend::Flex, BalancedCheckpointing);
    }
    #[cfg(feature = "cube")]
    {
        try_on!(burn_cubecl::Cube, NoCheckpointing);
        try_on!(burn_cubecl::Cube, BalancedCheckpointing);
    }
    Err(tensors)
}

/// Whether a tensor is on this autodiff backend; the only place that asks. Burn's dispatch is closed, so this list of
/// backends is that of the `#[backend_extension]` attributes.
fn is_on<B: SpBackend, C: CheckpointStrategy>(tensor: &DispatchTensor) -> bool
where
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    <DispatchTensor as DispatchKindConversion<Autodiff<B, C>>>::try_into_backend(tensor.clone()).is_ok()
}
