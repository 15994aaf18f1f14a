use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata};
use burn::tensor::Float;

use crate::tensor::{SpBackend, Transition, by_rows, product, rows, select};

/// An input of column-parallel layers that was gathered once for all of them, and what their backward passes share: the
/// payload of their nodes.
///
/// None of them keeps the gathered input. The first whose backward runs gathers it again, the others find it here. Each
/// leaves what the input's gradient needs of it, and the gather's own backward adds up the products, some rows at a time,
/// when the gathered input is gone: of a rank's temporary tensors only one is of all tokens and features at any time.
#[derive(Clone)]
pub struct ColumnInput {
    gather: Transition,
    /// A [`Shared`] of the backend that the layers run on.
    shared: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
}

struct Shared<B: Backend> {
    whole: Option<FloatTensor<B>>,
    /// The gradient of each layer's output, and the layer's weight.
    terms: Vec<(FloatTensor<B>, FloatTensor<B>)>,
}

impl fmt::Debug for ColumnInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ColumnInput({:?})", self.gather)
    }
}

impl ColumnInput {
    /// `gather` makes the input whole.
    pub(super) fn new(gather: Transition) -> Self {
        Self {
            gather,
            shared: Arc::default(),
        }
    }

    /// The input on all ranks' tokens.
    pub(crate) fn gather<B: SpBackend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        self.gather.run::<B, Float>(x)
    }

    fn shared<B: SpBackend, R>(&self, body: impl FnOnce(&mut Shared<B>) -> R) -> R {
        let mut shared = self.shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = shared.get_or_insert_with(|| {
            Box::new(Shared::<B> {
                whole: None,
                terms: Vec::new(),
            })
        });
        body(
            shared
                .downcast_mut()
                .expect("all layers of an input run on one backend"),
        )
    }

    /// In backward: the input on all ranks' tokens, gathered from `x` if no layer has done so.
    pub(super) fn again<B: SpBackend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        self.shared::<B, _>(|shared| {
            let gather = || Transition {
                site: self.gather.site.backward(),
                ..self.gather.clone()
            };
            shared.whole.get_or_insert_with(|| gather().run::<B, Float>(x)).clone()
        })
    }

    /// In backward: leaves a term `grad * weight^T` of the gradient. Says whether it is the first.
    pub(super) fn leave<B: SpBackend>(&self, grad: FloatTensor<B>, weight: FloatTensor<B>) -> bool {
        self.shared::<B, _>(|shared| {
            shared.terms.push((rows::<B>(grad), B::float_transpose(weight)));
            shared.terms.len() == 1
        })
    }

    /// In backward: the sum of the terms, each rank's own.
    fn gradient<B: SpBackend>(&self, like: &FloatTensor<B>) -> FloatTensor<B> {
        let terms = self.shared::<B, _>(|shared| {
            shared.whole = None;
            std::mem::take(&mut shared.terms)
        });
        let (shape, device) = (like.shape(), like.device());
        let (features, outer) = shape.as_slice().split_last().expect("a tensor with features");
        let (count, features) = (outer.iter().product(), *features);
        let sum = by_rows::<B>([count, features], &device, like.dtype(), |chunk| {
            let term = |(grad, weight): &(FloatTensor<B>, FloatTensor<B>)| {
                let rows = select::<B, Float>(grad.clone(), 0, std::slice::from_ref(&chunk));
                product::<B>(rows, weight.clone())
            };
            let sum = terms.iter().map(term).reduce(B::float_add);
            sum.expect("a layer has left its term: nothing else registers a gradient here")
        });
        B::float_reshape(sum, shape)
    }
}

/// [`ColumnInput::gather`] as an autodiff node. Only column-parallel layers read its output, so its gradient is the sum of
/// what they left; what they registered is nothing but the sign that one of them ran.
pub(crate) fn gather_input_autodiff<B: SpBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    input: ColumnInput,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct GatherInput;

    impl<B: SpBackend> Backward<B, 1> for GatherInput {
        type State = ColumnInput;

        fn backward(self, ops: Ops<ColumnInput, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
            let sign = grads.consume::<B>(&ops.node);
            let [parent] = ops.parents;
            if let Some(parent) = parent {
                let terms = ops.state.gradient::<B>(&sign);
                grads.register::<B>(parent.id, ops.state.gather.backward().run::<B, Float>(terms));
            }
        }
    }

    let guard = x.node();
    let whole = input.gather::<B>(x.into_primitive());
    // Compute-bound, as every collective: see `redistribute`.
    match GatherInput.prepare::<C>([guard]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(input, whole),
        OpsKind::UnTracked(prep) => prep.finish(whole),
    }
}
