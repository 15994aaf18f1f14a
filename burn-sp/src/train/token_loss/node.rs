use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, TensorMetadata};

use super::TokenLossSpec;
use crate::{attention::cast, tensor::SpBackend};

/// The gradients were made with the loss; backward scales them.
///
/// The output is a share of the loss, so what comes in is replicated over the ranks of a class group: each has scaled its
/// own tokens' gradients, and its own weights', by the same number.
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
                    let dtype = own.dtype();
                    let factor = B::float_reshape(upstream.clone(), [1, 1].into());
                    // In the loss's dtype: the factor itself must not be rounded to a narrower one.
                    let scaled = B::float_mul(cast::<B>(own, factor.dtype()), factor);
                    grads.register::<B>(parent.id, cast::<B>(scaled, dtype));
                }
            }
        }
    }

    let wanted = [hidden.is_tracked(), weight.is_tracked()];
    let guards = [hidden.node(), weight.node()];
    // Compute-bound: the ranks of a class group communicate, and one must not do so again on its own.
    let node = TokenLossNode.prepare::<C>(guards).compute_bound().stateful();
    let weights = weights.into_primitive();
    let loss = spec.forward::<B>(
        hidden.into_primitive(),
        weight.into_primitive(),
        targets,
        weights,
        wanted,
    );
    match node {
        OpsKind::Tracked(prep) => prep.finish([loss.hidden, loss.weight], loss.sum),
        OpsKind::UnTracked(prep) => prep.finish(loss.sum),
    }
}
