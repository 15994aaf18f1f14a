use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    blocks::{Block, KEYS, QUERIES, Visible},
    dropout::Dropout,
    gemm::{Matrix, Store, product},
    real::Real,
    rows::{Output, Rows, Writer},
    softmax::{self, Online},
    workspace,
};
use crate::problem::Problem;

/// With fewer tasks than this, tiles have fewer queries, so that all cores find work. A constant: the cutting
/// decides the rounding, which must not depend on the machine.
const TASKS: usize = 16;

/// One task is one head of one block of queries; it walks over the blocks of keys it sees, so that each result is
/// computed by one thread in one order.
pub fn forward<A: Real>(p: Problem, q: &FlexTensor, k: &FlexTensor, v: &FlexTensor) -> (FlexTensor, FlexTensor) {
    let rows = p.batch * p.heads;
    let mut size = QUERIES;
    while size > 64 && rows * p.queries.div_ceil(size) < TASKS {
        size /= 2;
    }
    let query_blocks = Block::cut(&p.spec.q_positions, size);
    let key_blocks = Block::cut(&p.spec.k_positions, KEYS);

    let mut out = Output::zeros(rows * p.queries * p.value_dim, p.result_dtype());
    let mut stats = Output::zeros(2 * rows * p.queries, p.accumulator);
    let heads = Heads::<A> {
        p,
        q: Rows::new(q),
        k: Rows::new(k),
        v: Rows::new(v),
        dropout: Dropout::of(&p),
        key_blocks: &key_blocks,
        out: out.writer(),
        stats: stats.writer(),
    };
    let per_head = query_blocks.len();
    let tasks = (0..rows * per_head).into_par_iter().with_max_len(1);
    tasks.for_each(|task| {
        let (row, block) = (task / per_head, &query_blocks[task % per_head]);
        heads.attend(row / p.heads, row % p.heads, block);
    });
    (
        out.into_tensor([p.batch, p.queries, p.heads, p.value_dim]),
        stats.into_tensor([2, p.batch, p.heads, p.queries]),
    )
}

struct Heads<'a, A> {
    p: Problem<'a>,
    q: Rows<'a, A>,
    k: Rows<'a, A>,
    v: Rows<'a, A>,
    dropout: Option<Dropout>,
    key_blocks: &'a [Block],
    out: Writer<'a>,
    stats: Writer<'a>,
}

impl<A: Real> Heads<'_, A> {
    fn attend(&self, batch: usize, head: usize, queries: &Block) {
        let p = &self.p;
        let row = batch * p.heads + head;
        let (rows, dim, value_dim) = (queries.len(), p.head_dim, p.value_dim);
        let stride = softmax::stride(KEYS);
        let sizes = [
            rows * dim,
            KEYS * dim,
            KEYS * value_dim,
            rows * stride,
            rows * value_dim,
            rows,
            rows,
        ];
        workspace::with(sizes, |[q, k_buffer, v_buffer, scores, out, max, sum]| {
            self.q.load(batch, head, &queries.rows, q);
            out.fill(A::ZERO);
            max.fill(A::NEG_INFINITY);
            sum.fill(A::ZERO);
            for block in self.key_blocks {
                let Some(visible) = Visible::of(&p.spec.mask, queries, block) else {
                    continue;
                };
                let keys = &visible.keys;
                let kv_head = p.spec.heads.kv_head(head);
                let k = self.k.borrow(batch, kv_head, &keys.rows, k_buffer);
                let v = self.v.borrow(batch, kv_head, &keys.rows, v_buffer);

                let scale = A::from_f64(p.spec.scale);
                let shape = (rows, keys.len(), dim);
                product(
                    shape,
                    Store::Overwrite,
                    scores,
                    stride,
                    scale,
                    Matrix::new(q, dim),
                    k.transposed(),
                );
                visible.hide(&p.spec.mask, queries, scores, stride);
                Online {
                    scores,
                    stride,
                    columns: keys.len(),
                    dropout: self.dropout.as_ref().map(|dropout| dropout.tile(row, queries, keys)),
                    max,
                    sum,
                    out,
                }
                .run();
                let v = if visible.mixed && !softmax::finite(v, keys.len(), value_dim) {
                    self.v.load(batch, kv_head, &keys.rows, v_buffer);
                    add_apart(scores, stride, &mut v_buffer[..keys.len() * value_dim], value_dim, out);
                    Matrix::new(v_buffer, value_dim)
                } else {
                    v
                };
                let shape = (rows, value_dim, keys.len());
                let one = A::from_f64(1.0);
                product(shape, Store::Add, out, value_dim, one, Matrix::new(scores, stride), v);
            }
            self.finish(batch, head, queries, out, max, sum);
        });
    }

    /// Divides by the sums of the weights, turns `sum` into its logarithm, and writes outputs and statistics.
    fn finish(&self, batch: usize, head: usize, queries: &Block, out: &mut [A], max: &[A], sum: &mut [A]) {
        let p = &self.p;
        for (i, token) in queries.rows.clone().enumerate() {
            let row = &mut out[i * p.value_dim..(i + 1) * p.value_dim];
            // A row that saw nothing stays 0, its maximum negative infinity and its logarithm 0. A sum that is NaN makes
            // the row NaN, even if dropout took the weights that are.
            if sum[i] != A::ZERO {
                let inverse = A::from_f64(1.0) / sum[i];
                row.iter_mut().for_each(|x| *x *= inverse);
                sum[i] = sum[i].ln();
            }
            let start = ((batch * p.queries + token) * p.heads + head) * p.value_dim;
            // SAFETY: this row of the output belongs to this task alone.
            unsafe { self.out.store(start, row) };
        }
        let start = (batch * p.heads + head) * p.queries + queries.rows.start;
        // SAFETY: these rows of the statistics belong to this task alone.
        unsafe {
            self.stats.store(start, max);
            self.stats.store(p.batch * p.heads * p.queries + start, sum);
        }
    }
}

/// Adds values that are not finite to the outputs of the queries that see them, and sets them to 0 for the product of
/// all queries and keys, in which 0 times NaN would bring them to queries that do not.
fn add_apart<A: Real>(weights: &[A], stride: usize, values: &mut [A], width: usize, out: &mut [A]) {
    for (key, value) in values.chunks_exact_mut(width).enumerate() {
        if value.iter().all(|&x| softmax::is_finite(x)) {
            continue;
        }
        for (out, weights) in out.chunks_exact_mut(width).zip(weights.chunks(stride)) {
            if weights[key] != A::ZERO {
                let pairs = out.iter_mut().zip(value.iter());
                pairs.for_each(|(out, &x)| *out += weights[key] * x);
            }
        }
        value.fill(A::ZERO);
    }
}
