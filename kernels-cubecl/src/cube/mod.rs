//! Kernels for every CubeCL runtime (CUDA, Vulkan, Metal, ...): one file an idea, generic over the float type.

mod attention;
mod exp;
#[cfg(feature = "fusion")]
mod fusion;
mod launch;
mod philox;
mod primitive;
mod reduce;
mod rows;

use burn_cubecl::{CubeBackend, tensor::CubeTensor};

pub use attention::AttentionPath;
pub use primitive::{enter, resolve_bool, resolve_float, resolve_int};

use crate::ops::forward_only;
use crate::{AttentionSpec, DropoutSpec, Kernels, RotaryStyle};

impl Kernels for CubeBackend {
    fn attention_forward(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        spec: &AttentionSpec,
    ) -> (CubeTensor, CubeTensor) {
        attention::forward(q, k, v, spec)
    }

    fn attention_backward(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        out: CubeTensor,
        stats: CubeTensor,
        grad_out: CubeTensor,
        spec: &AttentionSpec,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        attention::backward(q, k, v, out, stats, grad_out, spec)
    }

    fn attention_merge(
        out: CubeTensor,
        stats: CubeTensor,
        other_out: CubeTensor,
        other_stats: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        attention::merge(out, stats, other_out, other_stats)
    }

    fn rms_norm_forward(x: CubeTensor, weight: CubeTensor, eps: f64) -> (CubeTensor, CubeTensor) {
        rows::rms_norm::forward(x, weight, eps)
    }

    fn rms_norm_backward(
        x: CubeTensor,
        weight: CubeTensor,
        inverse_rms: CubeTensor,
        grad: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        rows::rms_norm::backward(x, weight, inverse_rms, grad)
    }

    fn layer_norm_forward(
        x: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        eps: f64,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        rows::layer_norm::forward(x, weight, bias, eps)
    }

    fn layer_norm_backward(
        x: CubeTensor,
        weight: CubeTensor,
        mean: CubeTensor,
        inverse_std: CubeTensor,
        grad: CubeTensor,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        rows::layer_norm::backward(x, weight, mean, inverse_std, grad)
    }

    fn residual_norm_forward(
        x: CubeTensor,
        update: CubeTensor,
        dropout: Option<&DropoutSpec>,
        weight: CubeTensor,
        bias: Option<CubeTensor>,
        eps: f64,
    ) -> (CubeTensor, CubeTensor, Option<CubeTensor>, CubeTensor) {
        rows::residual_norm::forward(x, update, dropout, weight, bias, eps)
    }

    fn swiglu_forward(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        rows::swiglu::forward(gate, up)
    }

    fn swiglu_backward(gate: CubeTensor, up: CubeTensor, grad: CubeTensor) -> (CubeTensor, CubeTensor) {
        rows::swiglu::backward(gate, up, grad)
    }

    fn gelu_tanh_forward(x: CubeTensor) -> CubeTensor {
        rows::gelu::forward(x)
    }

    fn gelu_tanh_backward(x: CubeTensor, grad: CubeTensor) -> CubeTensor {
        rows::gelu::backward(x, grad)
    }

    fn rotary(x: CubeTensor, cos: CubeTensor, sin: CubeTensor, style: RotaryStyle, inverse: bool) -> CubeTensor {
        rows::rotary::rotate(x, cos, sin, style, inverse)
    }

    fn cross_entropy_statistics(
        logits: CubeTensor,
        targets: CubeTensor,
        weights: CubeTensor,
        first: usize,
        total: usize,
    ) -> CubeTensor {
        rows::cross_entropy::statistics(logits, targets, weights, first, total)
    }

    fn cross_entropy_gradient(
        logits: CubeTensor,
        targets: CubeTensor,
        weights: CubeTensor,
        statistics: CubeTensor,
        first: usize,
    ) -> CubeTensor {
        rows::cross_entropy::gradient(logits, targets, weights, statistics, first)
    }

    fn dropout(x: CubeTensor, spec: &DropoutSpec) -> CubeTensor {
        rows::dropout::apply(x, spec)
    }
}

forward_only!(burn_cubecl::Cube);
