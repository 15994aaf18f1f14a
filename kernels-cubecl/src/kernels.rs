//! The raw kernels: what a backend has to supply. Nothing here is differentiable; [`FusedOps`](crate::FusedOps)
//! builds the autodiff nodes from these pairs.

use burn::backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};

use crate::{AttentionSpec, DropoutSpec, RotaryStyle, checks};

/// Forward and backward kernels of a backend, on plain (not autodiff) tensors.
///
/// Every kernel accepts any strides, returns contiguous tensors, accumulates in f32 (f64 for f64 inputs) and
/// allows dimensions of size 0. Without another word, what it returns is in the dtype of its first tensor.
///
/// # Panics
/// Every kernel, on tensors whose shapes or dtypes do not fit together or to the spec; the message says what would.
pub trait Kernels: Backend {
    /// Attention with its softmax statistics, in memory linear in the sequence (FlashAttention, arXiv 2205.14135).
    ///
    /// # Shapes
    /// - `q`: `[batch, queries, heads, head_dim]`
    /// - `k`: `[batch, keys, kv_heads, head_dim]`, `v`: `[batch, keys, kv_heads, value_dim]`
    /// - returns `out` `[batch, queries, heads, value_dim]` in the dtype of `q` (in the accumulation dtype if
    ///   `spec.wide`), and `stats` `[2, batch, heads, queries]` in the accumulation dtype: the largest score of each
    ///   query, and the natural logarithm of the sum of `exp(score - largest)`. Their sum is the log-sum-exp; apart they
    ///   keep the digits that one f32 loses where scores are large.
    ///
    /// A query that sees no key gets output 0 and statistics negative infinity and 0.
    ///
    /// A key and a query that does not see it have no influence on each other's results, forward and backward, whatever
    /// q, k and v hold there, NaN included. NaN in a query or in a key that it sees makes its output and log-sum-exp NaN;
    /// NaN in an element of a value makes that element of its output NaN.
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        spec: &AttentionSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Gradients `(dq, dk, dv)` of `sum(out * grad_out)`, in the dtypes of `q`, `k`, `v` (in the accumulation dtype
    /// if `spec.wide`). `out` and `stats` may come from a larger set of keys than `k` (a ring merges them first).
    /// `grad_out` must be finite: NaN there may also reach the gradients of values that the query does not see.
    ///
    /// # Shapes
    /// - `q`, `k`, `v`, `stats`: as [`attention_forward`](Self::attention_forward) takes and returns them
    /// - `out`, `grad_out`: `[batch, queries, heads, value_dim]`, in the dtype of `q` or the accumulation dtype
    /// - returns those of `q`, `k` and `v`
    fn attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        out: FloatTensor<Self>,
        stats: FloatTensor<Self>,
        grad_out: FloatTensor<Self>,
        spec: &AttentionSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The attention of the same queries to the keys of both parts, given that to each part alone: outputs are averaged
    /// by their shares of the softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv
    /// 1805.02867). A row that saw no key, output 0 and statistics negative infinity and 0, leaves the other part's
    /// bits alone.
    ///
    /// # Shapes
    /// - `out`, `other_out`: `[batch, queries, heads, value_dim]`, `stats`, `other_stats`: `[2, batch, heads, queries]`,
    ///   all in the accumulation dtype; returned likewise
    fn attention_merge(
        out: FloatTensor<Self>,
        stats: FloatTensor<Self>,
        other_out: FloatTensor<Self>,
        other_stats: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension; returns `(y, 1 / rms)`, the latter
    /// `[rows]` in the accumulation dtype.
    ///
    /// # Shapes
    /// - `x`: `[..., features]`, and so is `y`; `weight`: `[features]`
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `(dx, dweight)` of [`rms_norm_forward`](Self::rms_norm_forward).
    ///
    /// # Shapes
    /// - `x`, `grad`: `[..., features]`, and so is `dx`; `inverse_rms`: `[rows]`
    /// - `weight`: `[features]`, and so is `dweight`
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        inverse_rms: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `y = (x - mean) / sqrt(var + eps) * weight + bias` over the last dimension, biased variance; returns
    /// `(y, mean, 1 / std)`, the statistics `[rows]` in the accumulation dtype.
    ///
    /// # Shapes
    /// - `x`: `[..., features]`, and so is `y`; `weight`, `bias`: `[features]`
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `(dx, dweight, dbias)` of [`layer_norm_forward`](Self::layer_norm_forward).
    ///
    /// # Shapes
    /// - `x`, `grad`: `[..., features]`, and so is `dx`; `mean`, `inverse_std`: `[rows]`
    /// - `weight`: `[features]`, and so are `dweight` and `dbias`
    fn layer_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        inverse_std: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// An update of a residual stream and the norm behind it, in one pass: `sum = x + dropout(update)`, and of `sum` the
    /// layer norm if there is a bias, else the root mean square norm. Returns `(sum, y, mean, 1 / std)`, the latter three
    /// those of that norm: without a bias no mean, and `1 / rms`.
    ///
    /// The default calls [`dropout`](Self::dropout), an addition and the norm.
    ///
    /// # Shapes
    /// - `x`, `update`: `[..., features]`, and so are `sum` and `y`; `weight`, `bias`: `[features]`
    /// - returns the statistics `[rows]`, in the accumulation dtype
    fn residual_norm_forward(
        x: FloatTensor<Self>,
        update: FloatTensor<Self>,
        dropout: Option<&DropoutSpec>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        eps: f64,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        Option<FloatTensor<Self>>,
        FloatTensor<Self>,
    ) {
        checks::residual_norm(&x, &update, &weight, bias.as_ref());
        let update = match dropout {
            Some(spec) => Self::dropout(update, spec),
            None => update,
        };
        let sum = Self::float_add(x, update);
        match bias {
            Some(bias) => {
                let (y, mean, inverse_std) = Self::layer_norm_forward(sum.clone(), weight, bias, eps);
                (sum, y, Some(mean), inverse_std)
            }
            None => {
                let (y, inverse_rms) = Self::rms_norm_forward(sum.clone(), weight, eps);
                (sum, y, None, inverse_rms)
            }
        }
    }

    /// `silu(gate) * up`, elementwise.
    ///
    /// # Shapes
    /// - `gate`, `up`: any, both the same, and so is the result
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `(dgate, dup)` of [`swiglu_forward`](Self::swiglu_forward).
    ///
    /// # Shapes
    /// - `gate`, `up`, `grad`: any, all the same, and so are the results
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, elementwise; no finite `x` overflows.
    ///
    /// # Shapes
    /// - `x`: any, and so is the result
    fn gelu_tanh_forward(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `dx` of [`gelu_tanh_forward`](Self::gelu_tanh_forward).
    ///
    /// # Shapes
    /// - `x`, `grad`: any, both the same, and so is the result
    fn gelu_tanh_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Rotates pairs of the last dimension by angles given as cosines and sines; `inverse` turns the other way,
    /// which is also the gradient.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, heads, head_dim]`, and so is the result
    /// - `cos`, `sin`: `[tokens, head_dim / 2]` (f32, or f64 for f64 `x`)
    fn rotary(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        style: RotaryStyle,
        inverse: bool,
    ) -> FloatTensor<Self>;

    /// What a softmax cross entropy needs to know of each row: its largest logit, the sum of `exp(logit - largest)`, and
    /// the logit of its target. The loss is `weight * (ln(sum) + (largest - target's))`.
    ///
    /// The logits may be of some classes only, `first..first + classes` of `total`. Then a target that is not among them
    /// counts 0, and the parts' statistics merge: largest of the largest, sum of `sum * exp(largest - largest of all)`,
    /// sum of the targets'.
    ///
    /// # Shapes
    /// - `logits`: `[rows, classes]`, `targets`: `[rows]`, counted over all classes, `weights`: `[rows]` in the
    ///   accumulation dtype; a row whose weight is 0 is ignored, whatever it holds and whatever its target says
    /// - returns `[3, rows]` in the accumulation dtype; `(0, 1, 0)` for an ignored row
    fn cross_entropy_statistics(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: FloatTensor<Self>,
        first: usize,
        total: usize,
    ) -> FloatTensor<Self>;

    /// The gradient of the losses with respect to the logits, `weight * (softmax - onehot)`, given the statistics over
    /// all classes.
    ///
    /// # Shapes
    /// - as [`cross_entropy_statistics`](Self::cross_entropy_statistics); returns `[rows, classes]` in the dtype of
    ///   `logits`
    fn cross_entropy_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self>;

    /// `x * mask / keep`, the mask from the counter-based generator of [`DropoutSpec`], keyed by the *global* index
    /// of each element. It is its own gradient.
    ///
    /// # Shapes
    /// - `x`: as many as the spec has positions in each dimension, and so is the result
    fn dropout(x: FloatTensor<Self>, spec: &DropoutSpec) -> FloatTensor<Self>;
}
