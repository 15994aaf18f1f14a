use std::ops::Range;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    blocks::{Block, KEYS, QUERIES, Visible},
    dropout::Dropout,
    gemm::{Matrix, Store, product},
    real::Real,
    rows::{Output, Rows, Writer},
    softmax::{self, Gradient},
    workspace,
};
use crate::problem::Problem;

/// The keys of a head are dealt to several tasks if there would be fewer tasks than this. A constant: the number of
/// terms decides the rounding, which must not depend on the machine.
const TASKS: usize = 16;
/// Each share of a head's keys needs a query gradient of its own: a few, so that memory stays that of the result.
const SHARES: usize = 2;

/// The tensors beside q, k and v.
pub struct Saved<'a> {
    pub out: &'a FlexTensor,
    pub stats: &'a FlexTensor,
    pub grad_out: &'a FlexTensor,
}

/// One task is one query head and its share of the key blocks. It alone computes its head's part of the key and value
/// gradients for these keys, and one term of its head's query gradient; terms are added up at the end in a fixed
/// order, so the bits do not depend on the threads.
pub fn backward<A: Real>(
    p: Problem,
    q: &FlexTensor,
    k: &FlexTensor,
    v: &FlexTensor,
    saved: Saved,
) -> (FlexTensor, FlexTensor, FlexTensor) {
    let rows = p.batch * p.heads;
    let query_blocks = Block::cut(&p.spec.q_positions, QUERIES);
    let key_blocks = Block::cut(&p.spec.k_positions, KEYS);
    let shares = TASKS.div_ceil(rows.max(1)).min(SHARES).min(key_blocks.len()).max(1);
    let statistics = RowStatistics::<A>::new(&p, &saved);

    // With grouped heads, each query head has a term of its own here; otherwise these are the results.
    let one_to_one = p.one_to_one();
    let kv_dtype = if one_to_one { p.result_dtype() } else { p.accumulator };
    let mut dk = Output::zeros(rows * p.keys * p.head_dim, kv_dtype);
    let mut dv = Output::zeros(rows * p.keys * p.value_dim, kv_dtype);
    let mut dq = vec![A::ZERO; rows * shares * p.queries * p.head_dim];

    let heads = Heads {
        p,
        q: Rows::new(q),
        k: Rows::new(k),
        v: Rows::new(v),
        grad_out: Rows::new(saved.grad_out),
        statistics: &statistics,
        dropout: Dropout::of(&p),
        query_blocks: &query_blocks,
        dk: dk.writer(),
        dv: dv.writer(),
    };
    let term = p.queries * p.head_dim;
    let tasks = dq.par_chunks_mut(term.max(1)).enumerate().with_max_len(1);
    tasks.for_each(|(task, dq)| {
        let (row, share) = (task / shares, task % shares);
        // Dealt in turn: under a causal mask, early keys are seen by more queries than late ones.
        for keys in key_blocks.iter().skip(share).step_by(shares) {
            heads.differentiate(row / p.heads, row % p.heads, keys, dq);
        }
    });

    let dq_shape = [p.batch, p.queries, p.heads, p.head_dim];
    let dq = add_up(&p, &dq, dq_shape, |batch, token, head| {
        let first = (batch * p.heads + head) * shares;
        (first..first + shares).map(move |term| term * p.queries + token)
    });
    let kv = |terms: Output, width: usize| {
        let shape = [p.batch, p.keys, p.kv_heads, width];
        if one_to_one {
            return terms.into_tensor(shape);
        }
        add_up(&p, terms.as_slice::<A>(), shape, |batch, token, kv_head| {
            p.readers(kv_head)
                .map(move |head| (batch * p.keys + token) * p.heads + head)
        })
    };
    (dq, kv(dk, p.head_dim), kv(dv, p.value_dim))
}

/// For each row `[batch, heads, queries]`: the largest score, turned into positive infinity where there is none so that
/// all weights become 0; the logarithm of the sum of the weights relative to it; the sum of output times gradient.
struct RowStatistics<A> {
    largest: Vec<A>,
    log_sum: Vec<A>,
    delta: Vec<A>,
}

impl<A: Real> RowStatistics<A> {
    fn new(p: &Problem, saved: &Saved) -> Self {
        let [out, grad_out] = [saved.out, saved.grad_out].map(Rows::<A>::new);
        let [largest_given, log_sum_given] = [0, 1].map(|plane| Rows::<A>::of_plane(saved.stats, plane));
        let zeros = || vec![A::ZERO; p.batch * p.heads * p.queries];
        let (mut largest, mut log_sum, mut delta) = (zeros(), zeros(), zeros());
        let per_head = p.queries.max(1);
        let tasks = largest
            .par_chunks_mut(per_head)
            .zip(log_sum.par_chunks_mut(per_head))
            .zip(delta.par_chunks_mut(per_head))
            .enumerate();
        tasks.for_each(|(row, ((largest, log_sum), delta))| {
            let (batch, head, width) = (row / p.heads, row % p.heads, p.value_dim);
            log_sum_given.load(batch, head, &(0..p.queries), log_sum);
            largest_given.load(batch, head, &(0..p.queries), largest);
            for x in largest.iter_mut().filter(|x| **x == A::NEG_INFINITY) {
                *x = A::INFINITY;
            }
            workspace::with([QUERIES * width; 2], |[out_buffer, grad_buffer]| {
                for first in (0..p.queries).step_by(QUERIES) {
                    let tokens = first..p.queries.min(first + QUERIES);
                    out.load(batch, head, &tokens, out_buffer);
                    grad_out.load(batch, head, &tokens, grad_buffer);
                    for (i, token) in tokens.enumerate() {
                        let row = i * width..(i + 1) * width;
                        delta[token] = softmax::dot(&out_buffer[row.clone()], &grad_buffer[row]);
                    }
                }
            });
        });
        Self {
            largest,
            log_sum,
            delta,
        }
    }
}

struct Heads<'a, A> {
    p: Problem<'a>,
    q: Rows<'a, A>,
    k: Rows<'a, A>,
    v: Rows<'a, A>,
    grad_out: Rows<'a, A>,
    statistics: &'a RowStatistics<A>,
    dropout: Option<Dropout>,
    query_blocks: &'a [Block],
    dk: Writer<'a>,
    dv: Writer<'a>,
}

impl<A: Real> Heads<'_, A> {
    /// All that one head's attention to one block of keys adds to the gradients.
    fn differentiate(&self, batch: usize, head: usize, keys: &Block, dq: &mut [A]) {
        let p = &self.p;
        let row = batch * p.heads + head;
        let (dim, value_dim, len) = (p.head_dim, p.value_dim, keys.len());
        let stride = softmax::stride(len);
        let sizes = [
            len * dim,
            len * dim,
            len * value_dim,
            len * dim,
            len * value_dim,
            QUERIES * dim,
            QUERIES * value_dim,
            QUERIES * stride,
            QUERIES * stride,
        ];
        workspace::with(
            sizes,
            |[k, k_transposed, v_transposed, dk, dv, q_buffer, grad_out, scores, grads]| {
                let kv_head = p.spec.heads.kv_head(head);
                self.k.load(batch, kv_head, &keys.rows, k);
                transpose(k, dim, k_transposed);
                clear_infinite(k);
                self.v.load(batch, kv_head, &keys.rows, dv);
                transpose(dv, value_dim, v_transposed);
                dk.fill(A::ZERO);
                dv.fill(A::ZERO);
                for queries in self.query_blocks {
                    let Some(visible) = Visible::of(&p.spec.mask, queries, keys) else {
                        continue;
                    };
                    let dropout = self.dropout.as_ref();
                    let (rows, columns) = (queries.len(), visible.keys.len());
                    let first = visible.keys.rows.start - keys.rows.start;
                    let q = self.q.borrow(batch, head, &queries.rows, q_buffer);
                    let grad_out = self.grad_out.borrow(batch, head, &queries.rows, grad_out);

                    // Scores and gradients of the weights, then weights and gradients of the scores in their place.
                    let (one, scale) = (A::from_f64(1.0), A::from_f64(p.spec.scale));
                    let right = Matrix::new(&k_transposed[first..], len);
                    product((rows, columns, dim), Store::Overwrite, scores, stride, scale, q, right);
                    let right = Matrix::new(&v_transposed[first..], len);
                    product(
                        (rows, columns, value_dim),
                        Store::Overwrite,
                        grads,
                        stride,
                        one,
                        grad_out,
                        right,
                    );
                    visible.hide(&p.spec.mask, queries, scores, stride);
                    Gradient {
                        scores,
                        grads,
                        stride,
                        columns,
                        dropout: dropout.map(|dropout| dropout.tile(row, queries, &visible.keys)),
                        largest: self.of_rows(&self.statistics.largest, batch, head, &queries.rows),
                        log_sum: self.of_rows(&self.statistics.log_sum, batch, head, &queries.rows),
                        delta: self.of_rows(&self.statistics.delta, batch, head, &queries.rows),
                    }
                    .run();

                    let weights = Matrix::new(scores, stride);
                    let grads = Matrix::new(grads, stride);
                    let into = &mut dv[first * value_dim..];
                    product(
                        (columns, value_dim, rows),
                        Store::Add,
                        into,
                        value_dim,
                        one,
                        weights.transposed(),
                        grad_out,
                    );
                    let q = if softmax::finite(q, rows, dim) {
                        q
                    } else {
                        self.q.load(batch, head, &queries.rows, q_buffer);
                        clear_infinite(q_buffer);
                        Matrix::new(q_buffer, dim)
                    };
                    let into = &mut dk[first * dim..];
                    product(
                        (columns, dim, rows),
                        Store::Add,
                        into,
                        dim,
                        scale,
                        grads.transposed(),
                        q,
                    );
                    let into = &mut dq[queries.rows.start * dim..queries.rows.end * dim];
                    let right = Matrix::new(&k[first * dim..], dim);
                    product((rows, dim, columns), Store::Add, into, dim, scale, grads, right);
                }
                for (i, token) in keys.rows.clone().enumerate() {
                    let row = (batch * p.keys + token) * p.heads + head;
                    // SAFETY: only this task has this head and these keys.
                    unsafe {
                        self.dk.store(row * dim, &dk[i * dim..(i + 1) * dim]);
                        self.dv.store(row * value_dim, &dv[i * value_dim..(i + 1) * value_dim]);
                    }
                }
            },
        );
    }

    fn of_rows<'b>(&self, numbers: &'b [A], batch: usize, head: usize, rows: &Range<usize>) -> &'b [A] {
        let first = (batch * self.p.heads + head) * self.p.queries;
        &numbers[first + rows.start..first + rows.end]
    }
}

/// Sets what is not finite to 0, for a product with gradients of scores: where a pair is seen, its score has made its
/// gradient NaN already (or 0); where it is hidden, the gradient is 0, and 0 times NaN would be NaN.
fn clear_infinite<A: Real>(rows: &mut [A]) {
    for x in rows.iter_mut().filter(|x| !softmax::is_finite(**x)) {
        *x = A::ZERO;
    }
}

fn transpose<A: Copy>(rows: &[A], width: usize, into: &mut [A]) {
    let len = rows.len() / width;
    for (i, row) in rows.chunks_exact(width).enumerate() {
        for (j, &x) in row.iter().enumerate() {
            into[j * len + i] = x;
        }
    }
}

/// A `[batch, tokens, heads, width]` tensor, each row of which is the sum of rows of `terms`, in the order given.
fn add_up<A: Real, I: Iterator<Item = usize>>(
    p: &Problem,
    terms: &[A],
    shape: [usize; 4],
    rows_of: impl Fn(usize, usize, usize) -> I + Sync,
) -> FlexTensor {
    let [batch, tokens, heads, width] = shape;
    let mut sum = Output::zeros(batch * tokens * heads * width, p.result_dtype());
    let writer = sum.writer();
    (0..batch * tokens).into_par_iter().with_min_len(16).for_each(|row| {
        workspace::with([width], |[total]| {
            for head in 0..heads {
                total.fill(A::ZERO);
                for term in rows_of(row / tokens, row % tokens, head) {
                    let term = &terms[term * width..(term + 1) * width];
                    total.iter_mut().zip(term).for_each(|(total, &x)| *total += x);
                }
                // SAFETY: this row belongs to this task alone.
                unsafe { writer.store((row * heads + head) * width, total) };
            }
        });
    });
    sum.into_tensor(shape)
}
