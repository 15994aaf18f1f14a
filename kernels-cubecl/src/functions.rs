//! What users call: Burn tensors in, Burn tensors out.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::{AttentionSpec, DropoutSpec, FusedOps, RotaryStyle};

/// Fused attention; memory linear in the sequence, forward and backward.
///
/// # Shapes
/// - `q`: `[batch, queries, heads, head_dim]`
/// - `k`: `[batch, keys, kv_heads, head_dim]`, `v`: `[batch, keys, kv_heads, value_dim]`
/// - returns `[batch, queries, heads, value_dim]` and the log-sum-exp `[batch, heads, queries]`, which carries no
///   gradient
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, spec: AttentionSpec) -> (Tensor<4>, Tensor<3>) {
    let (out, lse) = <Dispatch as FusedOps>::attention(q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), spec);
    (Tensor::from_dispatch(out), Tensor::from_dispatch(lse))
}

/// Root mean square norm over the last dimension; keeps its input and one number a row for backward.
///
/// # Shapes
/// - `x`: `[..., features]`, `weight`: `[features]`
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::rms_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        eps,
    ))
}

/// Layer norm over the last dimension; keeps its input and two numbers a row for backward.
///
/// # Shapes
/// - `x`: `[..., features]`, `weight`, `bias`: `[features]`
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
/// - `x`, `update`: `[..., features]`, `weight`, `bias`: `[features]`
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
/// - `x`, `update`: `[..., features]`, `weight`: `[features]`
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

/// `silu(gate) * up`; keeps only its two inputs for backward.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::swiglu(gate.into_dispatch(), up.into_dispatch()))
}

/// GELU by its tanh approximation, `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel,
/// arXiv 1606.08415): that of GPT-2, and PyTorch's `gelu(x, approximate="tanh")`. Keeps only its input for backward.
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::gelu_tanh(x.into_dispatch()))
}

/// Rotary position embedding; keeps nothing of `x` for backward.
///
/// # Shapes
/// - `x`: `[batch, tokens, heads, head_dim]`; `cos`, `sin`: `[tokens, head_dim / 2]`
pub fn rotary(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>, style: RotaryStyle) -> Tensor<4> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::rotary_embedding(
        x.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        style,
    ))
}

/// Dropout whose mask is regenerated in backward, never stored.
pub fn dropout<const D: usize>(x: Tensor<D>, spec: DropoutSpec) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FusedOps>::counter_dropout(x.into_dispatch(), spec))
}
