//! The autodiff node of attention, shared by every strategy.

use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, TensorMetadata};

use super::strategy::{AttentionCall, HEADS, Saved};
use crate::tensor::SpBackend;

#[derive(Debug)]
struct ShardedAttention;

impl<B: SpBackend> Backward<B, 3> for ShardedAttention {
    type State = (AttentionCall, Saved<B>, usize);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (call, saved, kv_heads) = ops.state;
        let (dq, dk, dv) = call.backward::<B>(saved, grad, kv_heads);
        for (parent, grad) in ops.parents.into_iter().zip([dq, dk, dv]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

pub(crate) fn autodiff<B: SpBackend, C: CheckpointStrategy>(
    q: FloatTensor<Autodiff<B, C>>,
    k: FloatTensor<Autodiff<B, C>>,
    v: FloatTensor<Autodiff<B, C>>,
    call: AttentionCall,
) -> FloatTensor<Autodiff<B, C>> {
    let guards = [q.node(), k.node(), v.node()];
    let kv_heads = k.shape()[HEADS];
    let (out, saved) = call.forward::<B>(q.into_primitive(), k.into_primitive(), v.into_primitive());
    // Compute-bound: a strategy communicates, and must not be run again by one rank on its own.
    match ShardedAttention.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((call, saved, kv_heads), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
