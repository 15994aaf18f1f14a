use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use crate::{AttentionSpec, DropoutSpec, RotaryStyle};

/// The differentiable operations, routed to whatever backend and autodiff strategy a tensor is on.
///
/// Users call the functions of this crate; this trait is what a backend's adapter implements.
#[backend_extension(Flex: cfg(feature = "flex"), Autodiff)]
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

    /// See [`swiglu`](crate::swiglu).
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;

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
