//! The operations of this crate on autodiff tensors, for every backend and checkpointing strategy.

use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, unary},
};
use burn::backend::{
    Autodiff,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{Bool, Float, Int};

use super::{SpBackend, SpOps, transition::Transition};
use crate::{attention::AttentionCall, nn::ColumnInput, train::TokenLossSpec};

impl<B: SpBackend, C: CheckpointStrategy> SpOps for Autodiff<B, C> {
    fn redistribute(tensor: FloatTensor<Self>, transition: Transition) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Redistribute;

        impl<B: SpBackend> Backward<B, 1> for Redistribute {
            type State = Transition;

            fn backward(self, ops: Ops<Transition, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                    ops.state.backward().run::<B, Float>(grad)
                });
            }
        }

        // Compute-bound, so that gradient checkpointing keeps the result: a collective run again on one rank only
        // would wait for ever.
        let guard = tensor.node();
        let output = transition.run::<B, Float>(tensor.into_primitive());
        match Redistribute.prepare::<C>([guard]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(transition, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }

    fn redistribute_int(tensor: IntTensor<Self>, transition: Transition) -> IntTensor<Self> {
        transition.run::<B, Int>(tensor)
    }

    fn redistribute_bool(tensor: BoolTensor<Self>, transition: Transition) -> BoolTensor<Self> {
        transition.run::<B, Bool>(tensor)
    }

    fn sharded_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: AttentionCall,
    ) -> FloatTensor<Self> {
        crate::attention::autodiff::<B, C>(q, k, v, call)
    }

    fn token_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: FloatTensor<Self>,
        spec: TokenLossSpec,
    ) -> FloatTensor<Self> {
        crate::train::token_loss_autodiff::<B, C>(hidden, weight, targets, weights, spec)
    }

    fn gather_input(x: FloatTensor<Self>, input: ColumnInput) -> FloatTensor<Self> {
        crate::nn::gather_input_autodiff::<B, C>(x, input)
    }

    fn parallel_linear(
        x: FloatTensor<Self>,
        kept: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        input: Option<ColumnInput>,
    ) -> FloatTensor<Self> {
        crate::nn::parallel_linear_autodiff::<B, C>(x, kept, weight, input)
    }
}
