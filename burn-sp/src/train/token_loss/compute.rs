use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Float, Int, Slice};

use super::classes::ClassGroup;
use crate::{
    attention::cast,
    tensor::{SpBackend, product, select, zeros},
};

/// How the loss of local tokens is computed.
#[derive(Clone, Debug)]
pub struct TokenLossSpec {
    /// Local tokens of a chunk.
    pub(super) chunk: usize,
    /// The first class whose weights this rank holds.
    pub(super) first: usize,
    /// Classes of all ranks.
    pub(super) classes: usize,
    /// The ranks that hold the other classes, if any.
    pub(super) group: Option<ClassGroup>,
}

/// The sum of the losses of this rank's tokens, and the gradients that were asked for.
pub(crate) struct TokenLoss<B: Backend> {
    pub sum: FloatTensor<B>,
    pub hidden: Option<FloatTensor<B>>,
    pub weight: Option<FloatTensor<B>>,
}

/// Some tokens.
pub(super) struct Tokens<B: Backend> {
    /// `[rows, features]`.
    pub hidden: FloatTensor<B>,
    /// `[rows]`.
    pub targets: IntTensor<B>,
    /// `[rows]`.
    pub weights: FloatTensor<B>,
}

impl<B: SpBackend> Tokens<B> {
    fn slice(&self, range: &Range<usize>) -> Self {
        let ranges = std::slice::from_ref(range);
        Self {
            hidden: select::<B, Float>(self.hidden.clone(), 0, ranges),
            targets: select::<B, Int>(self.targets.clone(), 0, ranges),
            weights: select::<B, Float>(self.weights.clone(), 0, ranges),
        }
    }
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
        let mut sum = zeros::<B>([1], &device, accumulation);
        let mut grad_hidden = wanted[0].then(|| zeros::<B>(hidden.shape(), &device, hidden.dtype()));
        let mut grad_weight = wanted[1].then(|| zeros::<B>(weight.shape(), &device, accumulation));
        let tokens = Tokens::<B> {
            hidden,
            targets,
            weights,
        };
        let longest = self.group.as_ref().map_or(rows, ClassGroup::longest);
        for start in (0..longest).step_by(self.chunk) {
            let own = start.min(rows)..(start + self.chunk).min(rows);
            let chunk = tokens.slice(&own);
            let chunk = match &self.group {
                Some(group) => group.gather(chunk, start..start + self.chunk),
                None => chunk,
            };
            let logits = product::<B>(chunk.hidden.clone(), weight.clone());
            let statistics = B::cross_entropy_statistics(
                logits.clone(),
                chunk.targets.clone(),
                chunk.weights.clone(),
                self.first,
                self.classes,
            );
            let statistics = match &self.group {
                Some(group) => group.merge::<B>(statistics),
                None => statistics,
            };
            let losses = losses::<B>(statistics.clone(), chunk.weights.clone());
            let losses = match &self.group {
                Some(group) => group.own::<B>(losses, start..start + self.chunk),
                None => losses,
            };
            if !own.is_empty() {
                sum = B::float_add(sum, B::float_sum(losses));
            }
            if wanted == [false; 2] {
                continue;
            }
            let grad_logits = B::cross_entropy_gradient(logits, chunk.targets, chunk.weights, statistics, self.first);
            if let Some(grad) = grad_weight.take() {
                let term = product::<B>(B::float_transpose(chunk.hidden), grad_logits.clone());
                grad_weight = Some(B::float_add(grad, cast::<B>(term, accumulation)));
            }
            if let Some(grad) = grad_hidden.take() {
                let term = product::<B>(grad_logits, B::float_transpose(weight.clone()));
                let term = match &self.group {
                    Some(group) => group.scatter::<B>(term, start..start + self.chunk),
                    None => term,
                };
                let block = [Slice::from(own.clone()), Slice::from(0..features)];
                grad_hidden = Some(match own.is_empty() {
                    true => grad,
                    false => B::float_slice_assign(grad, &block, term),
                });
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

/// `weight * (ln(sum) + (peak - logit of the target))` of each row.
fn losses<B: SpBackend>(statistics: FloatTensor<B>, weights: FloatTensor<B>) -> FloatTensor<B> {
    let rows = weights.shape();
    let part = |index: usize| {
        let part = select::<B, Float>(statistics.clone(), 0, &[index..index + 1]);
        B::float_reshape(part, rows.clone())
    };
    let distance = B::float_sub(part(0), part(2));
    B::float_mul(weights, B::float_add(B::float_log(part(1)), distance))
}
