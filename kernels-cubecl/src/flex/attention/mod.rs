//! Fused attention on the CPU, forward with softmax statistics and backward, in memory linear in the sequence.
//!
//! The score matrix is cut into tiles ([`blocks`]) that fit into a core's cache. Forward keeps a running softmax
//! ([`softmax::Online`]) while it walks along a row of tiles; backward computes each tile again from two statistics of
//! each row, its largest score and the logarithm of the sum of its weights relative to it. Tiles that the mask hides
//! altogether cost nothing. [`rows`] alone knows strides and dtypes: everything else computes in f32, or f64 for f64
//! inputs, on small row-major matrices.

mod backward;
mod blocks;
mod dropout;
mod forward;
mod gemm;
mod merge;
mod real;
mod rows;
mod softmax;
mod workspace;

use burn::tensor::DType;

use self::backward::Saved;
use super::Float;
use crate::{AttentionSpec, problem::Problem};

pub fn forward(q: Float, k: Float, v: Float, spec: &AttentionSpec) -> (Float, Float) {
    let problem = Problem::check(&q, &k, &v, spec);
    match problem.accumulator {
        DType::F64 => forward::forward::<f64>(problem, &q, &k, &v),
        _ => forward::forward::<f32>(problem, &q, &k, &v),
    }
}

pub fn backward(
    q: Float,
    k: Float,
    v: Float,
    out: Float,
    stats: Float,
    grad_out: Float,
    spec: &AttentionSpec,
) -> (Float, Float, Float) {
    let problem = Problem::check(&q, &k, &v, spec);
    problem.check_backward(&out, &stats, &grad_out);
    let saved = Saved {
        out: &out,
        stats: &stats,
        grad_out: &grad_out,
    };
    match problem.accumulator {
        DType::F64 => backward::backward::<f64>(problem, &q, &k, &v, saved),
        _ => backward::backward::<f32>(problem, &q, &k, &v, saved),
    }
}

pub fn merge(out: Float, stats: Float, other_out: Float, other_stats: Float) -> (Float, Float) {
    match out.dtype() {
        DType::F64 => merge::merge::<f64>(out, stats, other_out, other_stats),
        _ => merge::merge::<f32>(out, stats, other_out, other_stats),
    }
}
