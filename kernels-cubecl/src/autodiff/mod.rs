//! The autodiff nodes, written once for every backend that implements [`Kernels`](crate::Kernels).

mod attention;
mod norms;
mod rows;

pub(crate) use attention::log_sum_exp;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, tensor::FloatTensor};

use crate::{AttentionSpec, DropoutSpec, FusedOps, Kernels, RotaryStyle};

type Float<B, C> = FloatTensor<Autodiff<B, C>>;

impl<B: Kernels, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn attention(q: Float<B, C>, k: Float<B, C>, v: Float<B, C>, spec: AttentionSpec) -> (Float<B, C>, Float<B, C>) {
        attention::attention::<B, C>(q, k, v, spec)
    }

    fn rms_norm(x: Float<B, C>, weight: Float<B, C>, eps: f64) -> Float<B, C> {
        norms::rms_norm::<B, C>(x, weight, eps)
    }

    fn layer_norm(x: Float<B, C>, weight: Float<B, C>, bias: Float<B, C>, eps: f64) -> Float<B, C> {
        norms::layer_norm::<B, C>(x, weight, bias, eps)
    }

    fn residual_layer_norm(
        x: Float<B, C>,
        update: Float<B, C>,
        dropout: Option<DropoutSpec>,
        weight: Float<B, C>,
        bias: Float<B, C>,
        eps: f64,
    ) -> (Float<B, C>, Float<B, C>) {
        norms::residual_norm::<B, C>(x, update, dropout, weight, Some(bias), eps)
    }

    fn residual_rms_norm(
        x: Float<B, C>,
        update: Float<B, C>,
        dropout: Option<DropoutSpec>,
        weight: Float<B, C>,
        eps: f64,
    ) -> (Float<B, C>, Float<B, C>) {
        norms::residual_norm::<B, C>(x, update, dropout, weight, None, eps)
    }

    fn swiglu(gate: Float<B, C>, up: Float<B, C>) -> Float<B, C> {
        rows::swiglu::<B, C>(gate, up)
    }

    fn gelu_tanh(x: Float<B, C>) -> Float<B, C> {
        rows::gelu::<B, C>(x)
    }

    fn rotary_embedding(x: Float<B, C>, cos: Float<B, C>, sin: Float<B, C>, style: RotaryStyle) -> Float<B, C> {
        rows::rotary::<B, C>(x, cos, sin, style)
    }

    fn counter_dropout(x: Float<B, C>, spec: DropoutSpec) -> Float<B, C> {
        rows::dropout::<B, C>(x, spec)
    }
}
