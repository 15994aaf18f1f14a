use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

use super::Float;
use crate::{AttentionSpec, Kernels};

#[derive(Debug)]
struct Attention;

/// Inputs are kept by the graph, which may share them with other nodes; output and statistics are this node's own.
#[derive(Debug, Clone)]
struct State<F> {
    inputs: [NodeId; 3],
    out: F,
    stats: F,
    spec: AttentionSpec,
}

impl<B: Kernels> Backward<B, 3> for Attention {
    type State = State<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let grad_out = grads.consume::<B>(&ops.node);
        let State {
            inputs,
            out,
            stats,
            spec,
        } = ops.state;
        let [q, k, v] = inputs.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let (dq, dk, dv) = B::attention_backward(q, k, v, out, stats, grad_out, &spec);
        for (parent, grad) in ops.parents.into_iter().zip([dq, dk, dv]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

pub fn attention<B: Kernels, C: CheckpointStrategy>(
    q: Float<B, C>,
    k: Float<B, C>,
    v: Float<B, C>,
    spec: AttentionSpec,
) -> (Float<B, C>, Float<B, C>) {
    let nodes = [q.node(), k.node(), v.node()];
    let (out, stats) = match Attention.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let inputs = [prep.checkpoint(&q), prep.checkpoint(&k), prep.checkpoint(&v)];
            let (out, stats) = B::attention_forward(q.into_primitive(), k.into_primitive(), v.into_primitive(), &spec);
            let state = State {
                inputs,
                out: out.clone(),
                stats: stats.clone(),
                // Gradients go to the inputs, hence in their dtype, even if the output is wide.
                spec: AttentionSpec { wide: false, ..spec },
            };
            (prep.finish(state, out), stats)
        }
        OpsKind::UnTracked(prep) => {
            let (out, stats) = B::attention_forward(q.into_primitive(), k.into_primitive(), v.into_primitive(), &spec);
            (prep.finish(out), stats)
        }
    };
    let lse = log_sum_exp::<B>(stats);
    (out, <Autodiff<B, C> as AutodiffBackend>::from_inner(lse))
}

/// `[batch, heads, queries]` from [`Kernels::attention_forward`]'s statistics.
pub fn log_sum_exp<B: Kernels>(stats: FloatTensor<B>) -> FloatTensor<B> {
    let shape = stats.shape();
    let lse = Shape::from([shape[1], shape[2], shape[3]]);
    B::float_reshape(B::float_sum_dim(stats, 0), lse)
}
