//! The autodiff node of a linear layer that keeps less than it reads.

use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata};

use super::ColumnInput;
use crate::tensor::{SpBackend, product, rows, zeros};

/// `x * weight` over the last dimension, which may be empty like any other.
pub(crate) fn multiply<B: SpBackend>(x: FloatTensor<B>, weight: FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = x.shape();
    let last = shape.num_dims() - 1;
    shape[last] = weight.shape()[1];
    B::float_reshape(product::<B>(rows::<B>(x), weight), shape)
}

#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    /// Unless the weight is frozen.
    x: Option<FloatTensor<B>>,
    /// Unless the input is frozen.
    weight: Option<FloatTensor<B>>,
    input: Option<ColumnInput>,
}

/// `x * weight`, of which backward gets `kept`: `x` itself, or this rank's tokens of it if `input` says how it was
/// gathered.
pub(crate) fn parallel_linear_autodiff<B: SpBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    kept: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    input: Option<ColumnInput>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct ParallelLinear;

    impl<B: SpBackend> Backward<B, 2> for ParallelLinear {
        type State = Saved<B>;

        fn backward(self, ops: Ops<Saved<B>, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
            let grad = grads.consume::<B>(&ops.node);
            let Saved { x, weight, input } = ops.state;
            let [x_parent, weight_parent] = ops.parents;
            // The weight's gradient first: its operand may be gone when the input's is made.
            if let (Some(parent), Some(x)) = (weight_parent, x) {
                let x = match &input {
                    Some(input) => input.again::<B>(x),
                    None => x,
                };
                let x = B::float_transpose(rows::<B>(x));
                grads.register::<B>(parent.id, product::<B>(x, rows::<B>(grad.clone())));
            }
            let (Some(parent), Some(weight)) = (x_parent, weight) else {
                return;
            };
            let Some(input) = input else {
                grads.register::<B>(parent.id, multiply::<B>(grad, B::float_transpose(weight)));
                return;
            };
            let mut shape = grad.shape();
            let (device, dtype, last) = (grad.device(), grad.dtype(), shape.num_dims() - 1);
            shape[last] = weight.shape()[0];
            if input.leave::<B>(grad, weight) {
                let one = zeros::<B>(vec![1; last + 1], &device, dtype);
                let sign = match shape.num_elements() {
                    0 => zeros::<B>(shape, &device, dtype),
                    _ => B::float_expand(one, shape),
                };
                grads.register::<B>(parent.id, sign);
            }
        }
    }

    let tracked = [x.is_tracked(), weight.is_tracked()];
    let node = ParallelLinear
        .prepare::<C>([x.node(), weight.node()])
        .compute_bound()
        .stateful();
    let (kept, weight) = (kept.into_primitive(), weight.into_primitive());
    let output = multiply::<B>(x.into_primitive(), weight.clone());
    match node {
        OpsKind::Tracked(prep) => prep.finish(
            Saved {
                x: tracked[1].then_some(kept),
                weight: tracked[0].then_some(weight),
                input,
            },
            output,
        ),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}
