//! Calling the kernels, and a reference that shares nothing with them.

use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor, TensorData};
use kernels_cubecl::{AttentionSpec, HeadMap, Kernels, Mask, Positions, philox::Philox};

use crate::backend::{Raw, device, supports};

/// Whether the device has a dtype; says so if not.
pub fn able(dtype: DType) -> bool {
    let able = supports(dtype);
    if !able {
        eprintln!("skipped: no {dtype:?} on this device");
    }
    able
}

pub fn spec(mask: Mask, q_positions: Positions, k_positions: Positions, scale: f64, heads: HeadMap) -> AttentionSpec {
    AttentionSpec {
        mask,
        q_positions,
        k_positions,
        scale,
        heads,
        dropout: None,
        wide: false,
    }
}

/// Reproducible numbers, roughly normal.
pub fn noise<const D: usize>(seed: u64, shape: [usize; D], dtype: DType) -> Tensor<D> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    };
    let values: Vec<f64> = (0..shape.iter().product())
        .map(|_| (0..4).map(|_| uniform()).sum::<f64>() * 1.7)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), (&device(), dtype))
}

pub fn primitive<const D: usize>(tensor: &Tensor<D>) -> FloatTensor<Raw> {
    tensor
        .clone()
        .try_into_primitive::<Raw>()
        .expect("a tensor on the device")
}

pub struct Forward {
    pub out: Tensor<4>,
    pub stats: Tensor<4>,
}

impl Forward {
    /// `[batch, heads, queries]`
    pub fn lse(&self) -> Tensor<3> {
        self.stats.clone().sum_dim(0).squeeze_dim::<3>(0)
    }
}

pub fn forward(q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>, spec: &AttentionSpec) -> Forward {
    let (out, stats) = Raw::attention_forward(primitive(q), primitive(k), primitive(v), spec);
    Forward {
        out: Tensor::from_primitive::<Raw>(out),
        stats: Tensor::from_primitive::<Raw>(stats),
    }
}

/// `[dq, dk, dv]`.
pub fn backward(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    forward: &Forward,
    grad_out: &Tensor<4>,
    spec: &AttentionSpec,
) -> [Tensor<4>; 3] {
    let (out, stats) = (primitive(&forward.out), primitive(&forward.stats));
    let grads = Raw::attention_backward(
        primitive(q),
        primitive(k),
        primitive(v),
        out,
        stats,
        primitive(grad_out),
        spec,
    );
    [grads.0, grads.1, grads.2].map(Tensor::from_primitive::<Raw>)
}

pub fn bytes<const D: usize>(tensor: &Tensor<D>) -> Vec<u8> {
    tensor.to_data().bytes().to_vec()
}

pub fn f64s<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Largest difference relative to the largest value expected; equal infinities do not differ.
pub fn error(actual: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let peak = expected
        .iter()
        .filter(|x| x.is_finite())
        .fold(1e-300, |peak: f64, x| peak.max(x.abs()));
    let differences = actual
        .iter()
        .zip(expected)
        .map(|(a, e)| if a == e { 0.0 } else { (a - e).abs() });
    differences.fold(0.0, |worst: f64, x| if x.is_nan() { f64::NAN } else { worst.max(x) }) / peak
}

/// What dropout multiplies the weight of a global query and key of a local sample and head by.
fn dropout_factor(spec: &AttentionSpec, [sample, head]: [usize; 2], [query, key]: [usize; 2]) -> f64 {
    let Some(dropout) = &spec.dropout else {
        return 1.0;
    };
    let global = |positions: &Positions, local| positions.iter().nth(local).expect("a position");
    let [_, heads, queries, keys] = dropout.shape;
    let row = (global(&dropout.batch, sample) * heads + global(&dropout.heads, head)) * queries + query;
    let word = Philox::new(dropout.seed, dropout.stream).word((row * keys + key) as u64);
    if f64::from(word) / 2f64.powi(32) < dropout.probability {
        0.0
    } else {
        1.0 / (1.0 - dropout.probability)
    }
}

/// Attention and its gradients by the definition, in f64, row by row.
pub struct Reference {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub grads: [Vec<f64>; 3],
}

impl Reference {
    pub fn new(q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>, grad_out: &Tensor<4>, spec: &AttentionSpec) -> Self {
        let [batches, queries, heads, dim] = q.dims();
        let [_, keys, kv_heads, value_dim] = v.dims();
        let [q, k, v, grad_out] = [q, k, v, grad_out].map(f64s);
        let mut out = vec![0.0; grad_out.len()];
        let mut lse = vec![f64::NEG_INFINITY; batches * heads * queries];
        let mut grads = [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
        let k_positions: Vec<usize> = spec.k_positions.iter().collect();
        for batch in 0..batches {
            for head in 0..heads {
                for (i, query) in spec.q_positions.iter().enumerate() {
                    let row = (batch * queries + i) * heads + head;
                    let kv_row = |j: usize| (batch * keys + j) * kv_heads + spec.heads.kv_head(head);
                    let seen: Vec<usize> = (0..keys)
                        .filter(|&j| spec.mask.visible(query, k_positions[j]))
                        .collect();
                    if seen.is_empty() {
                        continue;
                    }
                    let dot = |a: &[f64], i: usize, b: &[f64], j: usize, width: usize| -> f64 {
                        (0..width).map(|d| a[i * width + d] * b[j * width + d]).sum()
                    };
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|&j| spec.scale * dot(&q, row, &k, kv_row(j), dim))
                        .collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                    lse[(batch * heads + head) * queries + i] = max + sum.ln();
                    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp() / sum).collect();
                    let factor = |j: usize| dropout_factor(spec, [batch, head], [query, k_positions[j]]);
                    for (&j, weight) in seen.iter().zip(&weights) {
                        let weight = weight * factor(j);
                        for d in 0..value_dim {
                            out[row * value_dim + d] += weight * v[kv_row(j) * value_dim + d];
                            grads[2][kv_row(j) * value_dim + d] += weight * grad_out[row * value_dim + d];
                        }
                    }
                    let delta = dot(&out, row, &grad_out, row, value_dim);
                    for (&j, weight) in seen.iter().zip(&weights) {
                        let grad = factor(j) * dot(&grad_out, row, &v, kv_row(j), value_dim) - delta;
                        let grad = spec.scale * weight * grad;
                        for d in 0..dim {
                            grads[0][row * dim + d] += grad * k[kv_row(j) * dim + d];
                            grads[1][kv_row(j) * dim + d] += grad * q[row * dim + d];
                        }
                    }
                }
            }
        }
        Self { out, lse, grads }
    }
}
