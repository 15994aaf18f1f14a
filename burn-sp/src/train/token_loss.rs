//! Output layer and cross entropy in one node, chunk by chunk over the tokens: the logits of a long sequence are never
//! held at once, nor computed twice, because each chunk's gradients are made while its logits are there (as in Liger
//! Kernel, arXiv 2410.10989).

use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{DType, Int, Slice, Tensor};

use super::LossShare;
use crate::{
    SpOps, SpTensor,
    attention::cast,
    tensor::{Refusal, SpBackend},
};

/// About how many logits are held at once...
const CHUNK_ELEMENTS: usize = 1 << 20;
/// ...in chunks of a size that keeps the products efficient and, with a small vocabulary, the memory small.
const CHUNK_TOKENS: std::ops::RangeInclusive<usize> = 256..=1024;

/// Cross entropy of `hidden * weight` against next-token labels, as this rank's [`LossShare`]: the sum of
/// `token_weights * -log p(label)` over the tokens that are not ignored, divided by `count`.
///
/// # Shapes
/// - `hidden`: `[batch, tokens, features]`, `weight`: `[features, classes]`, replicated
/// - `labels`: `[batch, tokens]` in the layout of `hidden`; a negative label is ignored
/// - `token_weights`: the same, 1 if none are given
/// - `count`: of the whole (accumulated) batch, usually [`valid_tokens`](super::valid_tokens)
///
/// # Panics
/// If the layouts differ, or a label is not below the number of classes.
#[track_caller]
pub fn token_loss(
    hidden: SpTensor<3>,
    weight: Tensor<2>,
    labels: &SpTensor<2, Int>,
    token_weights: Option<&SpTensor<2>>,
    count: u64,
) -> LossShare {
    hidden.refuse_partial("token_loss");
    let token_layout = |layout: &crate::layout::Layout| layout.clone().with_shape(layout.shape()[..2].to_vec());
    let tokens = token_layout(hidden.layout());
    for other in [Some(labels.layout()), token_weights.map(SpTensor::layout)]
        .into_iter()
        .flatten()
    {
        if *other != tokens || !hidden.layout().shards(2).is_empty() {
            Refusal::new(
                "token_loss",
                format!("hidden is {} and the labels or weights {other}", hidden.layout()),
                "shard batch and tokens of all alike, and keep the features whole",
            )
            .refuse();
        }
    }
    let (hidden, layout, mesh) = hidden.into_parts();
    // Not reshape: there a length of 0 means that of the source, and a rank may own no token.
    let targets = labels.local().clone().flatten::<1>(0, 1);
    let dtype = if hidden.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let valid = targets
        .clone()
        .greater_equal_elem(0)
        .float()
        .cast(dtype)
        .div_scalar(count.max(1) as f64);
    let weights = match token_weights {
        Some(weights) => valid * weights.local().clone().cast(dtype).flatten::<1>(0, 1),
        None => valid,
    };
    let spec = TokenLossSpec {
        chunk: (CHUNK_ELEMENTS / weight.dims()[1].max(1)).clamp(*CHUNK_TOKENS.start(), *CHUNK_TOKENS.end()),
    };
    let sum = <Dispatch as SpOps>::token_loss(
        hidden.flatten::<2>(0, 1).into_dispatch(),
        weight.into_dispatch(),
        targets.into_dispatch(),
        weights.into_dispatch(),
        spec,
    );
    LossShare::from_local_sum(Tensor::from_dispatch(sum), &layout, mesh)
}

/// How the loss of local tokens is computed.
#[derive(Clone, Copy, Debug)]
pub struct TokenLossSpec {
    /// Tokens whose logits are held at once.
    pub chunk: usize,
}

/// The sum of the losses, and the gradients that were asked for.
pub(crate) struct TokenLoss<B: Backend> {
    pub sum: FloatTensor<B>,
    hidden: Option<FloatTensor<B>>,
    weight: Option<FloatTensor<B>>,
}

impl TokenLossSpec {
    /// Loss and, where `wanted`, the gradients of `hidden` and `weight`.
    pub(crate) fn forward<B: SpBackend>(
        &self,
        hidden: FloatTensor<B>,
        weight: FloatTensor<B>,
        targets: IntTensor<B>,
        weights: FloatTensor<B>,
        wanted: [bool; 2],
    ) -> TokenLoss<B> {
        let (rows, features) = (hidden.shape()[0], hidden.shape()[1]);
        let device = hidden.device();
        let accumulation = weights.dtype();
        let mut sum = B::float_zeros([1].into(), &device, accumulation.into());
        let mut grad_hidden = wanted[0].then(|| B::float_zeros(hidden.shape(), &device, hidden.dtype().into()));
        let mut grad_weight = wanted[1].then(|| B::float_zeros(weight.shape(), &device, accumulation.into()));
        for start in (0..rows).step_by(self.chunk) {
            let range = start..(start + self.chunk).min(rows);
            let tokens = [Slice::from(range.clone())];
            let block = [Slice::from(range), Slice::from(0..features)];
            let chunk = B::float_slice(hidden.clone(), &block);
            let logits = B::float_matmul(chunk.clone(), weight.clone());
            let (losses, grad_logits) = B::cross_entropy(
                logits,
                B::int_slice(targets.clone(), &tokens),
                B::float_slice(weights.clone(), &tokens),
            );
            sum = B::float_add(sum, B::float_sum(losses));
            if let Some(grad) = grad_hidden.take() {
                let own = B::float_matmul(grad_logits.clone(), B::float_transpose(weight.clone()));
                grad_hidden = Some(B::float_slice_assign(grad, &block, own));
            }
            if let Some(grad) = grad_weight.take() {
                let own = B::float_matmul(B::float_transpose(chunk), grad_logits);
                grad_weight = Some(B::float_add(grad, cast::<B>(own, accumulation)));
            }
        }
        let grad_weight = grad_weight.map(|grad| cast::<B>(grad, weight.dtype()));
        TokenLoss {
            sum,
            hidden: grad_hidden,
            weight: grad_weight,
        }
    }
}

pub(crate) fn token_loss_autodiff<B: SpBackend, C: CheckpointStrategy>(
    hidden: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    targets: IntTensor<B>,
    weights: FloatTensor<Autodiff<B, C>>,
    spec: TokenLossSpec,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct TokenLossNode;

    impl<B: SpBackend> Backward<B, 2> for TokenLossNode {
        type State = [Option<FloatTensor<B>>; 2];

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
            let upstream = grads.consume::<B>(&ops.node);
            for (parent, own) in ops.parents.into_iter().zip(ops.state) {
                if let (Some(parent), Some(own)) = (parent, own) {
                    let factor = B::float_reshape(cast::<B>(upstream.clone(), own.dtype()), [1, 1].into());
                    grads.register::<B>(parent.id, B::float_mul(own, factor));
                }
            }
        }
    }

    let guards = [hidden.node(), weight.node()];
    let node = TokenLossNode.prepare::<C>(guards).compute_bound().stateful();
    let wanted = matches!(node, OpsKind::Tracked(_));
    let weights = weights.into_primitive();
    let loss = spec.forward::<B>(
        hidden.into_primitive(),
        weight.into_primitive(),
        targets,
        weights,
        [wanted; 2],
    );
    match node {
        OpsKind::Tracked(prep) => prep.finish([loss.hidden, loss.weight], loss.sum),
        OpsKind::UnTracked(prep) => prep.finish(loss.sum),
    }
}
