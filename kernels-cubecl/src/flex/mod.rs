//! Native CPU kernels for Burn's Flex backend: one file an idea, SIMD chosen at run time.

mod attention;
mod rows;

use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};

use crate::ops::forward_only;
use crate::{AttentionSpec, DropoutSpec, Kernels, RotaryStyle};

type Float = FloatTensor<Flex>;

impl Kernels for Flex {
    fn attention_forward(q: Float, k: Float, v: Float, spec: &AttentionSpec) -> (Float, Float) {
        attention::forward(q, k, v, spec)
    }

    fn attention_backward(
        q: Float,
        k: Float,
        v: Float,
        out: Float,
        stats: Float,
        grad_out: Float,
        spec: &AttentionSpec,
    ) -> (Float, Float, Float) {
        attention::backward(q, k, v, out, stats, grad_out, spec)
    }

    fn attention_merge(out: Float, stats: Float, other_out: Float, other_stats: Float) -> (Float, Float) {
        attention::merge(out, stats, other_out, other_stats)
    }

    fn rms_norm_forward(x: Float, weight: Float, eps: f64) -> (Float, Float) {
        rows::rms_norm::forward(x, weight, eps)
    }

    fn rms_norm_backward(x: Float, weight: Float, inverse_rms: Float, grad: Float) -> (Float, Float) {
        rows::rms_norm::backward(x, weight, inverse_rms, grad)
    }

    fn layer_norm_forward(x: Float, weight: Float, bias: Float, eps: f64) -> (Float, Float, Float) {
        rows::layer_norm::forward(x, weight, bias, eps)
    }

    fn layer_norm_backward(
        x: Float,
        weight: Float,
        mean: Float,
        inverse_std: Float,
        grad: Float,
    ) -> (Float, Float, Float) {
        rows::layer_norm::backward(x, weight, mean, inverse_std, grad)
    }

    fn swiglu_forward(gate: Float, up: Float) -> Float {
        rows::swiglu::forward(gate, up)
    }

    fn swiglu_backward(gate: Float, up: Float, grad: Float) -> (Float, Float) {
        rows::swiglu::backward(gate, up, grad)
    }

    fn gelu_tanh_forward(x: Float) -> Float {
        rows::gelu::forward(x)
    }

    fn gelu_tanh_backward(x: Float, grad: Float) -> Float {
        rows::gelu::backward(x, grad)
    }

    fn rotary(x: Float, cos: Float, sin: Float, style: RotaryStyle, inverse: bool) -> Float {
        rows::rotary::rotate(x, cos, sin, style, inverse)
    }

    fn cross_entropy_statistics(
        logits: Float,
        targets: IntTensor<Flex>,
        weights: Float,
        first: usize,
        total: usize,
    ) -> Float {
        rows::cross_entropy::statistics(logits, targets, weights, first, total)
    }

    fn cross_entropy_gradient(
        logits: Float,
        targets: IntTensor<Flex>,
        weights: Float,
        statistics: Float,
        first: usize,
    ) -> Float {
        rows::cross_entropy::gradient(logits, targets, weights, statistics, first)
    }

    fn dropout(x: Float, spec: &DropoutSpec) -> Float {
        rows::dropout::apply(x, spec)
    }
}

forward_only!(Flex);
