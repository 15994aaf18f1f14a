//! What attention refuses, in the same words on every backend, and the checked sizes of a call.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use crate::{AttentionSpec, accumulation, dropout};

/// The dtype a kernel accumulates in, if it knows `dtype` at all.
fn accumulator(dtype: DType) -> Option<DType> {
    match dtype {
        DType::F64 => Some(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Some(DType::F32),
        _ => None,
    }
}

/// The sizes of one call, known to fit together.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Dtype of q, k and v.
    pub dtype: DType,
    pub accumulator: DType,
    pub spec: &'a AttentionSpec,
}

impl<'a> Problem<'a> {
    /// # Panics
    /// With one message that names the shapes and what would work, if they do not fit together.
    pub fn check<T: TensorMetadata>(q: &T, k: &T, v: &T, spec: &'a AttentionSpec) -> Self {
        let given = || {
            let [q, k, v] = [q, k, v].map(describe);
            format!("attention: q {q}, k {k}, v {v}")
        };
        let shape = |tensor: &T| <[usize; 4]>::try_from(tensor.shape().to_vec()).ok();
        let (Some(q_shape), Some(k_shape), Some(v_shape)) = (shape(q), shape(k), shape(v)) else {
            panic!(
                "{}: expected three tensors of rank 4, [batch, tokens, heads, dim]",
                given()
            );
        };
        let dtype = q.dtype();
        let Some(accumulator) = accumulator(dtype) else {
            panic!("{}: expected f64, f32, f16 or bf16", given());
        };
        let [batch, queries, heads, head_dim] = q_shape;
        let [_, keys, kv_heads, value_dim] = v_shape;
        let expected = [batch, keys, kv_heads];
        assert!(
            k.dtype() == dtype && v.dtype() == dtype,
            "{}: expected one dtype for all three",
            given()
        );
        assert!(
            k_shape[..3] == expected && v_shape[..3] == expected && k_shape[3] == head_dim,
            "{}: expected k [{batch}, keys, kv_heads, {head_dim}] and v [{batch}, keys, kv_heads, value_dim]",
            given()
        );
        assert!(
            head_dim > 0 && value_dim > 0,
            "{}: expected a head_dim and a value_dim of at least 1",
            given()
        );
        let map = spec.heads;
        assert!(
            heads == 0 || (map.ratio > 0 && map.kv_head(heads - 1) < kv_heads),
            "{}: {map:?} sends the {heads} query heads beyond the {kv_heads} key/value heads; \
             expected (heads - 1 + offset) / ratio < kv_heads",
            given()
        );
        for (name, tokens, positions) in [("q", queries, &spec.q_positions), ("k", keys, &spec.k_positions)] {
            assert!(
                tokens == positions.len(),
                "{}: {name} has {tokens} tokens but {name}_positions {} positions; expected as many",
                given(),
                positions.len()
            );
        }
        if let Some(mask) = &spec.dropout {
            let positions = [&mask.batch, &mask.heads, &spec.q_positions, &spec.k_positions];
            dropout::check(
                mask.probability,
                &mask.shape,
                &positions,
                &[batch, heads, queries, keys],
            )
            .unwrap_or_else(|wrong| panic!("{}: dropout: {wrong}", given()));
        }
        Self {
            batch,
            queries,
            keys,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            dtype,
            accumulator,
            spec,
        }
    }

    /// Checks what backward gets beside q, k and v.
    ///
    /// # Panics
    /// As [`check`](Self::check).
    pub fn check_backward<T: TensorMetadata>(&self, out: &T, stats: &T, grad_out: &T) {
        let rows = [self.batch, self.queries, self.heads, self.value_dim];
        let numbers = [2, self.batch, self.heads, self.queries];
        let fits = |tensor: &T, shape: &[usize], wide: bool| {
            let dtype = tensor.dtype();
            tensor.shape().as_slice() == shape && (dtype == self.accumulator || !wide && dtype == self.dtype)
        };
        assert!(
            fits(out, &rows, false) && fits(grad_out, &rows, false) && fits(stats, &numbers, true),
            "attention backward: out {}, grad_out {}, stats {}: expected out and grad_out {rows:?} in {:?} or {:?}, \
             and stats {numbers:?} in {:?}",
            describe(out),
            describe(grad_out),
            describe(stats),
            self.dtype,
            self.accumulator,
            self.accumulator,
        );
    }

    /// Dtype of outputs and gradients.
    pub fn result_dtype(&self) -> DType {
        if self.spec.wide { self.accumulator } else { self.dtype }
    }

    /// The query heads that read key/value head `kv_head`.
    pub fn readers(&self, kv_head: usize) -> Range<usize> {
        let map = self.spec.heads;
        let local = |head: usize| head.saturating_sub(map.offset).min(self.heads);
        local(kv_head * map.ratio)..local((kv_head + 1) * map.ratio)
    }

    /// Whether each key/value head is read by exactly one query head, its own.
    #[cfg(feature = "flex")]
    pub fn one_to_one(&self) -> bool {
        self.heads == self.kv_heads && (0..self.kv_heads).all(|head| self.readers(head) == (head..head + 1))
    }
}

/// Checks the parts that are to be merged; returns the shape of the outputs and the accumulation dtype.
///
/// # Panics
/// As [`Problem::check`].
pub fn check_merge<T: TensorMetadata>(out: &T, stats: &T, other_out: &T, other_stats: &T) -> ([usize; 4], DType) {
    let dtype = accumulation(out.dtype());
    let shape = <[usize; 4]>::try_from(out.shape().to_vec()).ok();
    let fits = shape.is_some_and(|shape| {
        let [batch, tokens, heads, _] = shape;
        other_out.shape().as_slice() == shape
            && [stats, other_stats].map(|stats| stats.shape().as_slice() == [2, batch, heads, tokens]) == [true; 2]
            && [out, stats, other_out, other_stats].map(|tensor| tensor.dtype() == dtype) == [true; 4]
    });
    let (Some(shape), true) = (shape, fits) else {
        panic!(
            "attention merge: outputs {} and {}, statistics {} and {}: expected [batch, tokens, heads, dim] and \
             [2, batch, heads, tokens] twice, all in the accumulation dtype",
            describe(out),
            describe(other_out),
            describe(stats),
            describe(other_stats)
        );
    };
    (shape, dtype)
}

fn describe(tensor: &impl TensorMetadata) -> String {
    format!("{:?} {:?}", tensor.shape().as_slice(), tensor.dtype())
}
