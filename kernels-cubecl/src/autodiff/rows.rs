//! The nodes of the row-wise kernels but the norms.

use burn::backend::{
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    tensor::FloatTensor,
};

use super::Float;
use crate::{DropoutSpec, Kernels, RotaryStyle};

pub fn swiglu<B: Kernels, C: CheckpointStrategy>(gate: Float<B, C>, up: Float<B, C>) -> Float<B, C> {
    #[derive(Debug)]
    struct SwiGlu;

    impl<B: Kernels> Backward<B, 2> for SwiGlu {
        /// gate, up.
        type State = [NodeId; 2];

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
            let [gate, up] = ops.state.map(|input| checkpointer.retrieve_node_output(input));
            let grad = grads.consume::<B>(&ops.node);
            let (dgate, dup) = B::swiglu_backward(gate, up, grad);
            let parents = ops.parents.map(|parent| parent.map(|parent| parent.id));
            register::<B, 2>(grads, parents, [dgate, dup]);
        }
    }

    let guards = [gate.node(), up.node()];
    let y = B::swiglu_forward(gate.primitive().clone(), up.primitive().clone());
    match SwiGlu.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let inputs = [prep.checkpoint(&gate), prep.checkpoint(&up)];
            prep.finish(inputs, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

pub fn gelu<B: Kernels, C: CheckpointStrategy>(x: Float<B, C>) -> Float<B, C> {
    #[derive(Debug)]
    struct Gelu;

    impl<B: Kernels> Backward<B, 1> for Gelu {
        /// x.
        type State = NodeId;

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
            let x = checkpointer.retrieve_node_output(ops.state);
            unary::<B, _>(ops.parents, ops.node, grads, |grad| B::gelu_tanh_backward(x, grad));
        }
    }

    let guards = [x.node()];
    let y = B::gelu_tanh_forward(x.primitive().clone());
    match Gelu.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let input = prep.checkpoint(&x);
            prep.finish(input, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// The tables are constants: they get no gradient even if they are tracked.
pub fn rotary<B: Kernels, C: CheckpointStrategy>(
    x: Float<B, C>,
    cos: Float<B, C>,
    sin: Float<B, C>,
    style: RotaryStyle,
) -> Float<B, C> {
    #[derive(Debug)]
    struct Rotary;

    impl<B: Kernels> Backward<B, 1> for Rotary {
        /// cos, sin; style.
        type State = ([FloatTensor<B>; 2], RotaryStyle);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
            let ([cos, sin], style) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                B::rotary(grad, cos, sin, style, true)
            });
        }
    }

    let guards = [x.node()];
    let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
    let y = B::rotary(x.into_primitive(), cos.clone(), sin.clone(), style, false);
    match Rotary.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(([cos, sin], style), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

pub fn dropout<B: Kernels, C: CheckpointStrategy>(x: Float<B, C>, spec: DropoutSpec) -> Float<B, C> {
    #[derive(Debug)]
    struct Dropout;

    impl<B: Kernels> Backward<B, 1> for Dropout {
        type State = DropoutSpec;

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
            unary::<B, _>(ops.parents, ops.node, grads, |grad| B::dropout(grad, &ops.state));
        }
    }

    let guards = [x.node()];
    let y = B::dropout(x.into_primitive(), &spec);
    match Dropout.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(spec, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// Hands each tracked parent its gradient.
pub fn register<B: Kernels, const N: usize>(
    grads: &mut Gradients,
    parents: [Option<NodeId>; N],
    gradients: [FloatTensor<B>; N],
) {
    for (parent, gradient) in parents.into_iter().zip(gradients) {
        if let Some(parent) = parent {
            grads.register::<B>(parent, gradient);
        }
    }
}
