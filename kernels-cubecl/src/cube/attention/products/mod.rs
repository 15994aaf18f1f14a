//! Attention composed of matrix products, which run on tensor cores where a device has them.
//!
//! The score matrix is cut into blocks of some hundred queries by as many keys. Those that the mask shows are computed one
//! after another, all heads at once: two products forward, five backward, and between them kernels that turn scores into
//! weights and gradients. A block of scores lives as long as it is used, so that memory stays linear in the sequence.
//! Weights and their gradients are rounded to the dtype of the inputs before they enter a product, as in any attention on
//! tensor cores; sums are in the accumulation dtype.

mod block;
mod gradient;
mod online;
mod pack;

use burn::tensor::Shape;
use burn_cubecl::{
    kernel::{
        cast,
        matmul::{MatmulStrategy, matmul},
    },
    tensor::CubeTensor,
};
use cubecl::prelude::*;

use self::{
    block::Block,
    gradient::{fold, gradient},
    online::{State, add, finish, online},
    pack::{infinite, pack},
};
use super::call::Call;
use crate::{
    HeadMap,
    cube::launch::{address, elem, elementwise, empty, into_contiguous},
};

/// Query heads as they are.
const OWN: HeadMap = HeadMap { ratio: 1, offset: 0 };

/// Output and statistics of a call that has queries, keys and heads, in blocks of `size` by `size`, a multiple of 32.
pub fn forward(call: &Call, [q, k, v]: [CubeTensor; 3], size: usize) -> (CubeTensor, CubeTensor) {
    let p = &call.problem;
    let rows = p.batch * p.heads;
    let map = p.spec.heads;
    let out = empty(&q, [p.batch, p.queries, p.heads, p.value_dim], p.result_dtype());
    let stats = empty(&q, [2, p.batch, p.heads, p.queries], p.accumulator);
    let tables = call.tables(&q, false, size, size);
    let infinite = infinite(&v);
    for (row, runs) in tables.rows.iter().enumerate() {
        let first = row * size;
        let len = size.min(p.queries - first);
        let q = pack(&q, [first, len], p.heads, OWN, p.dtype, false);
        let state = State {
            largest: filled(call, &q, [rows, len], f64::NEG_INFINITY),
            sum: filled(call, &q, [rows, len], 0.0),
            out: filled(call, &q, [rows, len, p.value_dim], 0.0),
        };
        for run in runs {
            for column in run.first..run.end {
                let block = Block::new(&tables, [row, column as usize], run, size, [p.queries, p.keys]);
                let keys = [block.first[1], block.len[1]];
                let k = pack(&k, keys, p.heads, map, p.dtype, false);
                let scores = product(call, q.clone(), transposed(k));
                let [weights, shrink] = online(call, &tables, &block, scores, &state);
                let seen = pack(&v, keys, p.heads, map, p.dtype, block.mixed());
                let product = product(call, weights.clone(), seen);
                add(
                    call,
                    &tables,
                    &block,
                    product,
                    [weights, shrink],
                    [&v, &infinite],
                    &state.out,
                );
            }
        }
        finish(call, &tables, state, first, [&out, &stats]);
    }
    (out, stats)
}

/// Gradients of a call that has queries, keys and heads, given the numbers of its rows from [`rows`](super::rows::rows).
pub fn backward(
    call: &Call,
    [q, k, v]: [CubeTensor; 3],
    grad_out: CubeTensor,
    row_numbers: CubeTensor,
    size: usize,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let p = &call.problem;
    let map = p.spec.heads;
    let tables = call.tables(&q, false, size, size);
    let [dq, dk, dv] = [&q, &k, &v].map(|like| filled(call, like, like.meta.shape().clone(), 0.0));
    for (row, runs) in tables.rows.iter().enumerate() {
        let queries = [row * size, size.min(p.queries - row * size)];
        if runs.is_empty() {
            continue;
        }
        let pack_queries = |from, clear| pack(from, queries, p.heads, OWN, p.dtype, clear);
        let grad = pack_queries(&grad_out, false);
        // What is not finite would reach others through 0 times NaN. It is in the score already, and with it in the
        // gradient of that score, wherever it is seen.
        let (raw_q, q) = (pack_queries(&q, false), pack_queries(&q, true));
        for run in runs {
            for column in run.first..run.end {
                let block = Block::new(&tables, [row, column as usize], run, size, [p.queries, p.keys]);
                let keys = [block.first[1], block.len[1]];
                let pack_keys = |from, clear| pack(from, keys, p.heads, map, p.dtype, clear);
                let scores = product(call, raw_q.clone(), transposed(pack_keys(&k, false)));
                let grads = product(call, grad.clone(), transposed(pack_keys(&v, false)));
                let [weights, grads] = gradient(call, &tables, &block, [scores, grads], &row_numbers);
                let part = product(call, transposed(weights), grad.clone());
                fold(call, part, &dv, keys[0], map, 1.0);
                let part = product(call, transposed(grads.clone()), q.clone());
                fold(call, part, &dk, keys[0], map, p.spec.scale);
                let part = product(call, grads, pack_keys(&k, true));
                fold(call, part, &dq, queries[0], OWN, p.spec.scale);
            }
        }
    }
    let [dq, dk, dv] = [dq, dk, dv].map(|sum| into_contiguous(cast(sum, p.result_dtype())));
    (dq, dk, dv)
}

/// The matrix product of each head, in the accumulation dtype.
fn product(call: &Call, left: CubeTensor, right: CubeTensor) -> CubeTensor {
    let dtype = call.problem.accumulator;
    let [heads, rows, _] = left.meta.shape().dims();
    // Burn's own choice of an output may have gaps between its rows.
    let out = empty(&left, [heads, rows, right.meta.shape()[2]], dtype);
    matmul(left, right, Some(out), MatmulStrategy::default(), dtype)
        .unwrap_or_else(|error| panic!("attention: no matrix product on this device: {error:?}"))
}

fn transposed(mut matrices: CubeTensor) -> CubeTensor {
    matrices.meta.swap(1, 2);
    matrices
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_kernel<A: Float>(into: &mut Tensor<A>, value: InputScalar, #[define(A)] _dtype: ElemType) {
    if ABSOLUTE_POS >= into.len() {
        terminate!();
    }
    into[ABSOLUTE_POS] = value.get::<A>();
}

/// A contiguous tensor of one number, in the accumulation dtype.
fn filled(call: &Call, like: &CubeTensor, shape: impl Into<Shape>, value: f64) -> CubeTensor {
    let into = empty(like, shape, call.problem.accumulator);
    let dtype = elem(into.dtype);
    let elements = into.meta.num_elements();
    let (cubes, dim) = elementwise(elements);
    // SAFETY: a unit past the last element ends at once.
    unsafe {
        fill_kernel::launch_unchecked(
            &into.client,
            cubes,
            dim,
            address(&[&into]),
            into.clone().into_tensor_arg(),
            InputScalar::new(value, dtype),
            dtype,
        );
    }
    into
}
