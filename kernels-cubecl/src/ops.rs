use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use crate::{AttentionSpec, DropoutSpec, RotaryStyle};

/// The differentiable operations, routed to whatever backend and autodiff strategy a tensor is on.
///
/// Users call the functions of this crate, whose shapes and refusals these have; this trait is what a backend's adapter
/// implements.
#[backend_extension(Flex: cfg(feature = "flex"), Cube: cfg(feature = "cube"), Autodiff)]
pub trait FusedOps: Backend {
    /// See [`attention`](crate::attention). Returns the output and the log-sum-exp, the latter without gradient.
    fn attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        spec: AttentionSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`rms_norm`](crate::rms_norm).
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;

    /// See [`layer_norm`](crate::layer_norm).
    fn layer_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;

    /// See [`residual_layer_norm`](crate::residual_layer_norm).
    fn residual_layer_norm(
        x: FloatTensor<Self>,
        update: FloatTensor<Self>,
        dropout: Option<DropoutSpec>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`residual_rms_norm`](crate::residual_rms_norm).
    fn residual_rms_norm(
        x: FloatTensor<Self>,
        update: FloatTensor<Self>,
        dropout: Option<DropoutSpec>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`swiglu`](crate::swiglu).
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`gelu`](crate::gelu()).
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`rotary`](crate::rotary).
    fn rotary_embedding(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        style: RotaryStyle,
    ) -> FloatTensor<Self>;

    /// See [`dropout`](crate::dropout).
    fn counter_dropout(x: FloatTensor<Self>, spec: DropoutSpec) -> FloatTensor<Self>;
}

/// The operations on a backend without autodiff: the forward kernels.
#[cfg(any(feature = "flex", feature = "cube"))]
macro_rules! forward_only {
    ($backend:ty) => {
        const _: () = {
            use burn::backend::tensor::FloatTensor;

            use crate::{AttentionSpec, DropoutSpec, FusedOps, Kernels, RotaryStyle};

            type Float = FloatTensor<$backend>;

            impl FusedOps for $backend {
                fn attention(q: Float, k: Float, v: Float, spec: AttentionSpec) -> (Float, Float) {
                    let (out, stats) = Self::attention_forward(q, k, v, &spec);
                    (out, crate::autodiff::log_sum_exp::<Self>(stats))
                }

                fn rms_norm(x: Float, weight: Float, eps: f64) -> Float {
                    Self::rms_norm_forward(x, weight, eps).0
                }

                fn layer_norm(x: Float, weight: Float, bias: Float, eps: f64) -> Float {
                    Self::layer_norm_forward(x, weight, bias, eps).0
                }

                fn residual_layer_norm(
                    x: Float,
                    update: Float,
                    dropout: Option<DropoutSpec>,
                    weight: Float,
                    bias: Float,
                    eps: f64,
                ) -> (Float, Float) {
                    let dropout = dropout.as_ref();
                    let (sum, y, ..) = Self::residual_norm_forward(x, update, dropout, weight, Some(bias), eps);
                    (sum, y)
                }

                fn residual_rms_norm(
                    x: Float,
                    update: Float,
                    dropout: Option<DropoutSpec>,
                    weight: Float,
                    eps: f64,
                ) -> (Float, Float) {
                    let dropout = dropout.as_ref();
                    let (sum, y, ..) = Self::residual_norm_forward(x, update, dropout, weight, None, eps);
                    (sum, y)
                }

                fn swiglu(gate: Float, up: Float) -> Float {
                    Self::swiglu_forward(gate, up)
                }

                fn gelu_tanh(x: Float) -> Float {
                    Self::gelu_tanh_forward(x)
                }

                fn rotary_embedding(x: Float, cos: Float, sin: Float, style: RotaryStyle) -> Float {
                    Self::rotary(x, cos, sin, style, false)
                }

                fn counter_dropout(x: Float, spec: DropoutSpec) -> Float {
                    Self::dropout(x, &spec)
                }
            }
        };
    };
}
#[cfg(any(feature = "flex", feature = "cube"))]
pub(crate) use forward_only;
