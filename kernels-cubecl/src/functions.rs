//! What users call: Burn tensors in, Burn tensors out.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::{AttentionSpec, DropoutSpec, FusedOps, RotaryStyle};

/// Fused attention; memory linear in the sequence, forward and backward (as in FlashAttention, arXiv 2205.14135).
///
/// A query that sees no key gets output 0 and log-sum-exp negative infinity.
///
/// # Shapes
/// - `q`: `[batch, queries, heads, head_dim]`
/// - `k`: `[batch, keys, kv_heads, head_dim]`, `v`: `[batch, keys, kv_heads, value_dim]`
/// - returns `[batch, queries, heads, value_dim]` and the log-sum-exp `[batch, heads, queries]`, in nats and in the
///   [accumulation dtype](crate::accumulation), which carries no gradient
///
/// # Panics
/// If shapes, dtypes, positions and heads do not fit together; the message says what would.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kernels_cubecl::{AttentionSpec, HeadMap, Mask, Positions, attention};
///
/// // All scores are 0, so each query gets the mean of the values that it sees: the first 2, and all 4.
/// let device = Device::flex();
/// let q = Tensor::<4>::zeros([1, 2, 1, 8], &device);
/// let k = Tensor::<4>::zeros([1, 4, 1, 8], &device);
/// let v = Tensor::<1>::from_floats([1.0, 3.0, 5.0, 7.0], &device).reshape([1, 4, 1, 1]);
/// let spec = AttentionSpec {
///     mask: Mask::Causal,
///     q_positions: Positions::new([1..2, 3..4]),
///     k_positions: Positions::whole(4),
///     scale: 1.0 / 8f64.sqrt(),
///     heads: HeadMap::new(1, 1),
///     dropout: None,
///     wide: false,
/// };
/// let (out, lse) = attention(q, k, v, spec);
/// assert_eq!(out.into_data().to_vec::<f32>().unwrap(), [2.0, 4.0]);
/// assert_eq!(lse.into_data().to_vec::<f32>().unwrap(), [2f32.ln(), 4f32.ln()]);
/// ```
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, spec: AttentionSpec) -> (Tensor<4>, Tensor<3>) {
    let (out, lse) = <Dispatch as FusedOps>::attention(q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), spec);
    (Tensor::from_dispatch(out), Tensor::from_dispatch(lse))
}

/// Root mean square norm over the last dimension, `x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, arXiv
/// 1910.07467); keeps its input and one number a row for backward.
///
/// # Shapes
/// - `x`: `[..., features]`, and so is the result; `weight`: `[features]`, in the dtype of `x`
///
/// # Panics
/// If shapes or dtypes do not fit together.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::rms_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        eps,
    ))
}

/// Layer norm over the last dimension, `(x - mean) / sqrt(var + eps) * weight + bias` with the biased variance (Ba et
/// al., arXiv 1607.06450); keeps its input and two numbers a row for backward.
///
/// # Shapes
/// - `x`: `[..., features]`, and so is the result; `weight`, `bias`: `[features]`, in the dtype of `x`
///
/// # Panics
/// If shapes or dtypes do not fit together.
pub fn layer_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, bias: Tensor<1>, eps: f64) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::layer_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
        eps,
    ))
}

/// An update of a residual stream and the layer norm behind it, in one pass: `sum = x + dropout(update)` and
/// `layer_norm(sum)`, both returned. Keeps the sum and two numbers a row for backward.
///
/// # Shapes
/// - `x`, `update`: `[..., features]`, and so are both results; `weight`, `bias`: `[features]`, all in one dtype
///
/// # Panics
/// If shapes or dtypes do not fit together, or the dropout is that of another tensor.
pub fn residual_layer_norm<const D: usize>(
    x: Tensor<D>,
    update: Tensor<D>,
    dropout: Option<DropoutSpec>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    let (sum, y) = <Dispatch as FusedOps>::residual_layer_norm(
        x.into_dispatch(),
        update.into_dispatch(),
        dropout,
        weight.into_dispatch(),
        bias.into_dispatch(),
        eps,
    );
    (Tensor::from_dispatch(sum), Tensor::from_dispatch(y))
}

/// As [`residual_layer_norm`], with a root mean square norm; keeps the sum and one number a row for backward.
///
/// # Shapes
/// - `x`, `update`: `[..., features]`, and so are both results; `weight`: `[features]`, all in one dtype
///
/// # Panics
/// As [`residual_layer_norm`].
pub fn residual_rms_norm<const D: usize>(
    x: Tensor<D>,
    update: Tensor<D>,
    dropout: Option<DropoutSpec>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    let (sum, y) = <Dispatch as FusedOps>::residual_rms_norm(
        x.into_dispatch(),
        update.into_dispatch(),
        dropout,
        weight.into_dispatch(),
        eps,
    );
    (Tensor::from_dispatch(sum), Tensor::from_dispatch(y))
}

/// `silu(gate) * up`, elementwise (SwiGLU: Shazeer, arXiv 2002.05202); keeps only its two inputs for backward.
///
/// # Shapes
/// - `gate`, `up`: any, both the same, and so is the result
///
/// # Panics
/// If shapes or dtypes do not fit together.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::swiglu(gate.into_dispatch(), up.into_dispatch()))
}

/// GELU by its tanh approximation, `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel,
/// arXiv 1606.08415): that of GPT-2, and PyTorch's `gelu(x, approximate="tanh")`. Keeps only its input for backward.
///
/// # Shapes
/// - `x`: any, and so is the result
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::gelu_tanh(x.into_dispatch()))
}

/// Rotary position embedding (Su et al., arXiv 2104.09864): pairs of a head's elements turn by angles that are given as
/// cosines and sines. Keeps nothing of `x` for backward.
///
/// # Shapes
/// - `x`: `[batch, tokens, heads, head_dim]`, and so is the result
/// - `cos`, `sin`: `[tokens, head_dim / 2]`, in the [accumulation dtype](crate::accumulation)
///
/// # Panics
/// If `head_dim` is odd, or shapes or dtypes do not fit together.
pub fn rotary(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>, style: RotaryStyle) -> Tensor<4> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::rotary_embedding(
        x.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        style,
    ))
}

/// Dropout whose mask is drawn again in backward, never stored: elements are 0 with the probability of the spec, the
/// others divided by the probability to stay (Srivastava et al., "Dropout", 2014).
///
/// # Shapes
/// - `x`: as many as the spec has positions in each dimension, and so is the result
///
/// # Panics
/// If the spec is that of another tensor, or its probability is not in `[0, 1)`.
pub fn dropout<const D: usize>(x: Tensor<D>, spec: DropoutSpec) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::counter_dropout(x.into_dispatch(), spec))
}
