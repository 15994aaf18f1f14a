//! The nodes of the norms, alone and behind a residual connection.

use burn::backend::{
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, binary},
    },
    tensor::FloatTensor,
};

use super::{Float, rows::register};
use crate::{DropoutSpec, Kernels};

pub fn rms_norm<B: Kernels, C: CheckpointStrategy>(x: Float<B, C>, weight: Float<B, C>, eps: f64) -> Float<B, C> {
    let (y, inverse_rms) = B::rms_norm_forward(x.primitive().clone(), weight.primitive().clone(), eps);
    rms_norm_node::<B, C>(&x, &weight, y, inverse_rms)
}

pub fn layer_norm<B: Kernels, C: CheckpointStrategy>(
    x: Float<B, C>,
    weight: Float<B, C>,
    bias: Float<B, C>,
    eps: f64,
) -> Float<B, C> {
    let (y, mean, inverse_std) = B::layer_norm_forward(
        x.primitive().clone(),
        weight.primitive().clone(),
        bias.primitive().clone(),
        eps,
    );
    layer_norm_node::<B, C>(&x, &weight, &bias, y, [mean, inverse_std])
}

/// One forward kernel, two nodes: the sum, and the norm of it.
pub fn residual_norm<B: Kernels, C: CheckpointStrategy>(
    x: Float<B, C>,
    update: Float<B, C>,
    dropout: Option<DropoutSpec>,
    weight: Float<B, C>,
    bias: Option<Float<B, C>>,
    eps: f64,
) -> (Float<B, C>, Float<B, C>) {
    #[derive(Debug)]
    struct Residual;

    impl<B: Kernels> Backward<B, 2> for Residual {
        type State = Option<DropoutSpec>;

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
            binary::<B, _, _>(
                ops.parents,
                ops.node,
                grads,
                |grad| grad,
                |grad| match &ops.state {
                    Some(spec) => B::dropout(grad, spec),
                    None => grad,
                },
            );
        }
    }

    let guards = [x.node(), update.node()];
    let (sum, y, mean, inverse) = B::residual_norm_forward(
        x.into_primitive(),
        update.into_primitive(),
        dropout.as_ref(),
        weight.primitive().clone(),
        bias.as_ref().map(|bias| bias.primitive().clone()),
        eps,
    );
    let sum: Float<B, C> = match Residual.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(dropout, sum),
        OpsKind::UnTracked(prep) => prep.finish(sum),
    };
    let y = match (&bias, mean) {
        (Some(bias), Some(mean)) => layer_norm_node::<B, C>(&sum, &weight, bias, y, [mean, inverse]),
        _ => rms_norm_node::<B, C>(&sum, &weight, y, inverse),
    };
    (sum, y)
}

fn rms_norm_node<B: Kernels, C: CheckpointStrategy>(
    x: &Float<B, C>,
    weight: &Float<B, C>,
    y: FloatTensor<B>,
    inverse_rms: FloatTensor<B>,
) -> Float<B, C> {
    #[derive(Debug)]
    struct RmsNorm;

    impl<B: Kernels> Backward<B, 2> for RmsNorm {
        /// x, weight; 1 / rms.
        type State = ([NodeId; 2], FloatTensor<B>);

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
            let (inputs, inverse_rms) = ops.state;
            let [x, weight] = inputs.map(|input| checkpointer.retrieve_node_output(input));
            let grad = grads.consume::<B>(&ops.node);
            let (dx, dweight) = B::rms_norm_backward(x, weight, inverse_rms, grad);
            let parents = ops.parents.map(|parent| parent.map(|parent| parent.id));
            register::<B, 2>(grads, parents, [dx, dweight]);
        }
    }

    let guards = [x.node(), weight.node()];
    match RmsNorm.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let inputs = [prep.checkpoint(x), prep.checkpoint(weight)];
            prep.finish((inputs, inverse_rms), y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

fn layer_norm_node<B: Kernels, C: CheckpointStrategy>(
    x: &Float<B, C>,
    weight: &Float<B, C>,
    bias: &Float<B, C>,
    y: FloatTensor<B>,
    statistics: [FloatTensor<B>; 2],
) -> Float<B, C> {
    #[derive(Debug)]
    struct LayerNorm;

    impl<B: Kernels> Backward<B, 3> for LayerNorm {
        /// x, weight; mean, 1 / std.
        type State = ([NodeId; 2], [FloatTensor<B>; 2]);

        fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
            let (inputs, [mean, inverse_std]) = ops.state;
            let [x, weight] = inputs.map(|input| checkpointer.retrieve_node_output(input));
            let grad = grads.consume::<B>(&ops.node);
            let (dx, dweight, dbias) = B::layer_norm_backward(x, weight, mean, inverse_std, grad);
            let parents = ops.parents.map(|parent| parent.map(|parent| parent.id));
            register::<B, 3>(grads, parents, [dx, dweight, dbias]);
        }
    }

    let guards = [x.node(), weight.node(), bias.node()];
    match LayerNorm.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let inputs = [prep.checkpoint(x), prep.checkpoint(weight)];
            prep.finish((inputs, statistics), y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}
