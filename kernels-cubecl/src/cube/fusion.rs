//! The kernels under Burn's operator fusion: what is queued before a kernel runs first, and its results enter the
//! queue again as finished tensors.
//!
//! `#[backend_extension(.., Fusion)]` could queue kernels instead; but collectives must have their tensors on the rank's
//! own thread, so there is one way out of the queue and in again for both.

use burn::backend::{
    fusion::Fusion,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::CubeBackend;

use super::{enter, resolve_float, resolve_int};
use crate::{AttentionSpec, DropoutSpec, Kernels, RotaryStyle};

type Fused = Fusion<CubeBackend>;
type Float = FloatTensor<Fused>;

impl Kernels for Fused {
    fn attention_forward(q: Float, k: Float, v: Float, spec: &AttentionSpec) -> (Float, Float) {
        let [q, k, v] = [q, k, v].map(resolve_float);
        let (out, stats) = CubeBackend::attention_forward(q, k, v, spec);
        (enter(out), enter(stats))
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
        let [q, k, v, out, stats, grad_out] = [q, k, v, out, stats, grad_out].map(resolve_float);
        let (dq, dk, dv) = CubeBackend::attention_backward(q, k, v, out, stats, grad_out, spec);
        (enter(dq), enter(dk), enter(dv))
    }

    fn attention_merge(out: Float, stats: Float, other_out: Float, other_stats: Float) -> (Float, Float) {
        let [out, stats, other_out, other_stats] = [out, stats, other_out, other_stats].map(resolve_float);
        let (out, stats) = CubeBackend::attention_merge(out, stats, other_out, other_stats);
        (enter(out), enter(stats))
    }

    fn rms_norm_forward(x: Float, weight: Float, eps: f64) -> (Float, Float) {
        let [x, weight] = [x, weight].map(resolve_float);
        let (y, inverse_rms) = CubeBackend::rms_norm_forward(x, weight, eps);
        (enter(y), enter(inverse_rms))
    }

    fn rms_norm_backward(x: Float, weight: Float, inverse_rms: Float, grad: Float) -> (Float, Float) {
        let [x, weight, inverse_rms, grad] = [x, weight, inverse_rms, grad].map(resolve_float);
        let (dx, dweight) = CubeBackend::rms_norm_backward(x, weight, inverse_rms, grad);
        (enter(dx), enter(dweight))
    }

    fn layer_norm_forward(x: Float, weight: Float, bias: Float, eps: f64) -> (Float, Float, Float) {
        let [x, weight, bias] = [x, weight, bias].map(resolve_float);
        let (y, mean, inverse_std) = CubeBackend::layer_norm_forward(x, weight, bias, eps);
        (enter(y), enter(mean), enter(inverse_std))
    }

    fn layer_norm_backward(
        x: Float,
        weight: Float,
        mean: Float,
        inverse_std: Float,
        grad: Float,
    ) -> (Float, Float, Float) {
        let [x, weight, mean, inverse_std, grad] = [x, weight, mean, inverse_std, grad].map(resolve_float);
        let (dx, dweight, dbias) = CubeBackend::layer_norm_backward(x, weight, mean, inverse_std, grad);
        (enter(dx), enter(dweight), enter(dbias))
    }

    fn residual_norm_forward(
        x: Float,
        update: Float,
        dropout: Option<&DropoutSpec>,
        weight: Float,
        bias: Option<Float>,
        eps: f64,
    ) -> (Float, Float, Option<Float>, Float) {
        let [x, update, weight] = [x, update, weight].map(resolve_float);
        let bias = bias.map(resolve_float);
        let (sum, y, mean, inverse) = CubeBackend::residual_norm_forward(x, update, dropout, weight, bias, eps);
        (enter(sum), enter(y), mean.map(enter), enter(inverse))
    }

    fn swiglu_forward(gate: Float, up: Float) -> Float {
        let [gate, up] = [gate, up].map(resolve_float);
        enter(CubeBackend::swiglu_forward(gate, up))
    }

    fn swiglu_backward(gate: Float, up: Float, grad: Float) -> (Float, Float) {
        let [gate, up, grad] = [gate, up, grad].map(resolve_float);
        let (dgate, dup) = CubeBackend::swiglu_backward(gate, up, grad);
        (enter(dgate), enter(dup))
    }

    fn gelu_tanh_forward(x: Float) -> Float {
        enter(CubeBackend::gelu_tanh_forward(resolve_float(x)))
    }

    fn gelu_tanh_backward(x: Float, grad: Float) -> Float {
        let [x, grad] = [x, grad].map(resolve_float);
        enter(CubeBackend::gelu_tanh_backward(x, grad))
    }

    fn rotary(x: Float, cos: Float, sin: Float, style: RotaryStyle, inverse: bool) -> Float {
        let [x, cos, sin] = [x, cos, sin].map(resolve_float);
        enter(CubeBackend::rotary(x, cos, sin, style, inverse))
    }

    fn cross_entropy_statistics(
        logits: Float,
        targets: IntTensor<Fused>,
        weights: Float,
        first: usize,
        total: usize,
    ) -> Float {
        let [logits, weights] = [logits, weights].map(resolve_float);
        let targets = resolve_int(targets);
        enter(CubeBackend::cross_entropy_statistics(
            logits, targets, weights, first, total,
        ))
    }

    fn cross_entropy_gradient(
        logits: Float,
        targets: IntTensor<Fused>,
        weights: Float,
        statistics: Float,
        first: usize,
    ) -> Float {
        let [logits, weights, statistics] = [logits, weights, statistics].map(resolve_float);
        let targets = resolve_int(targets);
        enter(CubeBackend::cross_entropy_gradient(
            logits, targets, weights, statistics, first,
        ))
    }

    fn dropout(x: Float, spec: &DropoutSpec) -> Float {
        enter(CubeBackend::dropout(resolve_float(x), spec))
    }
}
