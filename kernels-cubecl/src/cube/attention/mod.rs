//! Fused attention, forward with softmax statistics and backward, in memory linear in the sequence.
//!
//! The host works out which tiles of the score matrix the mask lets through ([`tables`]); the device walks along them, tile
//! by tile in kernels of one piece ([`forward`], [`queries`], [`keys`]) or in blocks by matrix products ([`products`]).

mod call;
mod draw;
mod forward;
mod keys;
mod ln;
mod merge;
mod path;
mod products;
mod queries;
mod rows;
mod special;
mod tables;
mod tile;

use burn_cubecl::{ops::numeric::zeros_client, tensor::CubeTensor};

use self::call::Call;
pub use self::{merge::merge, path::AttentionPath};
use super::launch::{empty, into_contiguous};
use crate::{AttentionSpec, problem::Problem};

/// See [`Kernels::attention_forward`](crate::Kernels::attention_forward).
pub fn forward(q: CubeTensor, k: CubeTensor, v: CubeTensor, spec: &AttentionSpec) -> (CubeTensor, CubeTensor) {
    let problem = Problem::check(&q, &k, &v, spec);
    let p = &problem;
    if p.batch * p.queries * p.heads == 0 {
        let out = empty(&q, [p.batch, p.queries, p.heads, p.value_dim], p.result_dtype());
        let stats = empty(&q, [2, p.batch, p.heads, p.queries], p.accumulator);
        return (out, stats);
    }
    let inputs = [q, k, v].map(into_contiguous);
    match AttentionPath::of(p, &inputs[0]) {
        AttentionPath::Products { block } if p.keys > 0 => products::forward(&Call { problem }, inputs, block),
        _ => forward::forward(&Call { problem }, inputs),
    }
}

/// See [`Kernels::attention_backward`](crate::Kernels::attention_backward).
pub fn backward(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    out: CubeTensor,
    stats: CubeTensor,
    grad_out: CubeTensor,
    spec: &AttentionSpec,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let problem = Problem::check(&q, &k, &v, spec);
    problem.check_backward(&out, &stats, &grad_out);
    let p = &problem;
    if p.batch * p.queries * p.heads * p.keys == 0 {
        let zeros = |like: CubeTensor| {
            let shape = like.meta.shape().clone();
            zeros_client(like.client, like.device, shape, p.result_dtype())
        };
        return (zeros(q), zeros(k), zeros(v));
    }
    let [q, k, v, out, stats, grad_out] = [q, k, v, out, stats, grad_out].map(into_contiguous);
    let call = Call { problem };
    let path = AttentionPath::of(&call.problem, &q);
    let rows = rows::rows(&call, out, stats, grad_out.clone());
    let inputs = [q, k, v];
    if let AttentionPath::Products { block } = path {
        return products::backward(&call, inputs, grad_out, rows, block);
    }
    let (dk, dv) = keys::keys(&call, inputs.clone(), grad_out.clone(), rows.clone());
    (queries::queries(&call, inputs, grad_out, rows), dk, dv)
}
