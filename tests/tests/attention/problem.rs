//! An attention problem, run on any mesh and put together again, beside its definition in loops.
#![allow(dead_code, reason = "each suite uses its part")]

use std::collections::BTreeSet;

use burn::tensor::{DType, Device, Tensor};
use burn_sp::attention::{AttentionOptions, KvMove, Mask, attention};
use burn_sp::kernels::philox::Philox;
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::nn::DropoutKey;
use burn_sp::{SpDevice, SpTensor, launch};

use crate::common::{self, config, f64s, noise};

/// Shapes, who sees whom, how keys travel, dtype.
#[derive(Clone, Debug)]
pub struct Problem {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub mask: Mask,
    pub kv: KvMove,
    /// Share of the attention weights that are dropped.
    pub dropout: f64,
    pub dtype: DType,
}

const KEY: DropoutKey = DropoutKey {
    seed: 11,
    step: 5,
    layer: 3,
};

impl Problem {
    pub fn new(tokens: usize, heads: usize, kv_heads: usize, mask: Mask) -> Self {
        Self {
            batch: 2,
            tokens,
            heads,
            kv_heads,
            dim: 4,
            mask,
            kv: KvMove::Ring,
            dropout: 0.0,
            dtype: DType::F32,
        }
    }

    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.heads, self.dim]
    }

    pub fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.kv_heads, self.dim]
    }

    pub fn shapes(&self) -> [[usize; 4]; 3] {
        [self.q_shape(), self.k_shape(), self.k_shape()]
    }

    pub fn options(&self) -> AttentionOptions {
        AttentionOptions {
            mask: self.mask.clone(),
            kv: self.kv,
            dropout: self.dropout,
            dropout_key: Some(KEY),
            ..AttentionOptions::default()
        }
    }

    pub fn in_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    pub fn moving(self, kv: KvMove) -> Self {
        Self { kv, ..self }
    }

    /// Samples over dp, tokens over ring and ulysses, heads over tp; key/value heads only if every rank's query heads
    /// read its own ones alone.
    pub fn layouts(&self, mesh: MeshShape, split: &Split) -> [Layout; 3] {
        let heads = Split::Contiguous.parts(self.heads, mesh.tp);
        let kv_heads = Split::Contiguous.parts(self.kv_heads, mesh.tp);
        let ratio = self.heads / self.kv_heads;
        let own = (0..mesh.tp).all(|rank| {
            let read: BTreeSet<usize> = heads
                .of(rank)
                .iter()
                .cloned()
                .flatten()
                .map(|head| head / ratio)
                .collect();
            read == kv_heads.of(rank).iter().cloned().flatten().collect()
        });
        let tokens = |shape: [usize; 4]| common::sequence(shape, split.clone());
        let q = tokens(self.q_shape()).shard(2, Axis::Tp, Split::Contiguous);
        let k = match own {
            true => tokens(self.k_shape()).shard(2, Axis::Tp, Split::Contiguous),
            false => tokens(self.k_shape()),
        };
        [q, k.clone(), k]
    }

    /// q, k, v and the gradient of the output.
    pub fn values(&self) -> [Vec<f64>; 4] {
        let [q, k, v] = self.shapes();
        let mut seed = 0;
        [q, k, v, q].map(|shape| {
            seed += 1;
            noise(seed, shape.iter().product())
        })
    }
}

/// Whole tensors put together from what the ranks hold.
#[derive(Clone, Debug)]
pub struct Whole {
    pub out: Vec<f64>,
    pub grads: [Vec<f64>; 3],
}

impl Whole {
    pub fn all(&self) -> [(&'static str, &Vec<f64>); 4] {
        let [dq, dk, dv] = &self.grads;
        [("out", &self.out), ("dq", dq), ("dk", dk), ("dv", dv)]
    }
}

/// A rank's part of a tensor: where its elements stand in the whole one, and what they are.
pub type Piece = Vec<(usize, f64)>;

pub fn piece<const D: usize>(local: &Tensor<D>, layout: &Layout, device: &SpDevice) -> Piece {
    let of = |dim: usize| {
        layout
            .positions(dim, device.mesh())
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
    };
    let index = (0..D).fold(vec![0], |indices, dim| {
        let (positions, len) = (of(dim), layout.shape()[dim]);
        indices
            .iter()
            .flat_map(|index| positions.iter().map(move |at| index * len + at))
            .collect()
    });
    let values = f64s(local);
    assert_eq!(index.len(), values.len(), "the local tensor is what the layout says");
    index.into_iter().zip(values).collect()
}

/// Every element exactly once.
pub fn whole(pieces: Vec<Piece>, elements: usize) -> Vec<f64> {
    let mut all = vec![None; elements];
    for (index, value) in pieces.into_iter().flatten() {
        assert!(all[index].replace(value).is_none(), "element {index} is held twice");
    }
    all.into_iter()
        .map(|value| value.expect("every element is held"))
        .collect()
}

/// The sum of terms.
pub fn total(pieces: Vec<Piece>, elements: usize) -> Vec<f64> {
    let mut all = vec![0.0; elements];
    for (index, value) in pieces.into_iter().flatten() {
        all[index] += value;
    }
    all
}

/// Forward and backward on a mesh, put together.
pub fn run(problem: &Problem, values: &[Vec<f64>; 4], mesh: MeshShape, split: &Split, device: &Device) -> Whole {
    let layouts = problem.layouts(mesh, split);
    let mut results = launch(&config(mesh), device, |device| {
        let local = |values: &[f64], layout: &Layout| {
            let shape: [usize; 4] = layout.shape().to_vec().try_into().expect("four dimensions");
            let whole = common::tensor(values, shape, problem.dtype, device.device());
            device.distribute(whole, layout).into_local().detach()
        };
        let leaves = [0, 1, 2].map(|index| local(&values[index], &layouts[index]).require_grad());
        let [q, k, v] =
            [0, 1, 2].map(|index| SpTensor::from_local(leaves[index].clone(), layouts[index].clone(), &device));
        let out = attention(q, k, v, &problem.options());
        assert_eq!(*out.layout(), layouts[0]);
        let grads = (out.local().clone() * local(&values[3], &layouts[0])).sum().backward();
        let mut pieces = vec![piece(out.local(), &layouts[0], &device)];
        for (leaf, layout) in leaves.iter().zip(&layouts) {
            let grad = leaf.grad(&grads).expect("every input has a gradient");
            assert_eq!(
                grad.dtype(),
                problem.dtype,
                "case 29: the gradient's dtype is the input's"
            );
            pieces.push(piece(&grad, layout, &device));
        }
        pieces
    })
    .unwrap_or_else(|error| panic!("{problem:?} on {mesh}, {split}: {error}"));
    let mut take = |layout: &Layout| {
        let pieces = results.iter_mut().map(|pieces| pieces.remove(0)).collect();
        let elements = layout.shape().iter().product();
        // Ranks that use other heads of whole keys and values have terms of their gradients.
        match layout.placement(Axis::Tp) {
            Placement::Replicate if mesh.tp > 1 => total(pieces, elements),
            _ => whole(pieces, elements),
        }
    };
    let out = take(&layouts[0]);
    let grads = [0, 1, 2].map(|index| take(&layouts[index]));
    Whole { out, grads }
}

pub fn flex() -> Device {
    Device::flex().autodiff()
}

/// One rank in f64, on the inputs that `problem`'s dtype has.
pub fn truth(problem: &Problem, values: &[Vec<f64>; 4]) -> Whole {
    let problem = problem.clone().in_dtype(DType::F64);
    run(&problem, values, MeshShape::default(), &Split::Contiguous, &flex())
}

/// One rank in the problem's dtype.
pub fn single(problem: &Problem, values: &[Vec<f64>; 4]) -> Whole {
    run(problem, values, MeshShape::default(), &Split::Contiguous, &flex())
}

/// The inputs as their dtype rounds them.
pub fn rounded(problem: &Problem) -> [Vec<f64>; 4] {
    let device = Device::flex();
    problem.values().map(|values| {
        let count = values.len();
        f64s(&common::tensor(&values, [count], problem.dtype, &device))
    })
}

pub fn rms(found: &[f64], truth: &[f64]) -> f64 {
    let squares: f64 = found.iter().zip(truth).map(|(a, b)| (a - b).powi(2)).sum();
    (squares / found.len().max(1) as f64).sqrt()
}

fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::BF16 => f64::from(burn::tensor::bf16::EPSILON),
        _ => f64::from(f32::EPSILON),
    }
}

/// Design section 4: within 1.5 times one rank's error against f64.
#[track_caller]
pub fn within(found: &Whole, single: &Whole, truth: &Whole, dtype: DType, context: &str) {
    for (((name, found), (_, single)), (_, truth)) in found.all().into_iter().zip(single.all()).zip(truth.all()) {
        let peak = truth.iter().fold(0.0f64, |peak, x| peak.max(x.abs()));
        let (error, one) = (rms(found, truth), rms(single, truth));
        let allowed = 1.5 * one.max(epsilon(dtype) * peak);
        assert!(
            error <= allowed,
            "{context}: {name} is off by {error:e}, one rank by {one:e}"
        );
    }
}

pub fn splits() -> [Split; 2] {
    [Split::Contiguous, Split::Zigzag]
}

/// What f64 says, by the definition: scores, softmax, dropout, and their derivatives, in loops.
pub fn by_definition(problem: &Problem, values: &[Vec<f64>; 4]) -> Whole {
    let [batch, s, heads, d] = problem.q_shape();
    let (g, ratio) = (problem.kv_heads, problem.heads / problem.kv_heads);
    let scale = 1.0 / (d as f64).sqrt();
    let [q, k, v, dout] = values;
    fn row(values: &[f64], width: usize, number: usize) -> &[f64] {
        &values[number * width..(number + 1) * width]
    }
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut whole = Whole {
        out: vec![0.0; q.len()],
        grads: [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]],
    };
    let add = |into: &mut [f64], number: usize, what: &[f64], factor: f64| {
        for (into, what) in into[number * d..(number + 1) * d].iter_mut().zip(what) {
            *into += factor * what;
        }
    };
    for (b, h, i) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..s).map(move |i| (b, h, i)))) {
        let own = (b * s + i) * heads + h;
        let other = |j: usize| (b * s + j) * g + h / ratio;
        let keys: Vec<usize> = (0..s).filter(|j| problem.mask.visible(i, *j)).collect();
        let query = row(q, d, own);
        let scores: Vec<f64> = keys
            .iter()
            .map(|j| (scale * dot(query, row(k, d, other(*j)))).exp())
            .collect();
        let sum: f64 = scores.iter().sum();
        let upstream = row(dout, d, own);
        // What is left of each weight: 0, or one over the share that stays.
        let left = |j: usize| {
            let word =
                Philox::new(KEY.seed, KEY.step << 16 | KEY.layer).word((((b * heads + h) * s + i) * s + j) as u64);
            let stays = f64::from(word) >= problem.dropout * 2f64.powi(32);
            if stays { 1.0 / (1.0 - problem.dropout) } else { 0.0 }
        };
        let left: Vec<f64> = keys.iter().map(|j| left(*j)).collect();
        let arrived: Vec<f64> = keys
            .iter()
            .zip(&left)
            .map(|(j, left)| left * dot(upstream, row(v, d, other(*j))))
            .collect();
        let mean: f64 = scores.iter().zip(&arrived).map(|(p, a)| p / sum * a).sum();
        for (((j, score), arrived), left) in keys.iter().zip(&scores).zip(&arrived).zip(&left) {
            let p = score / sum;
            let ds = p * (arrived - mean) * scale;
            add(&mut whole.out, own, row(v, d, other(*j)), left * p);
            add(&mut whole.grads[0], own, row(k, d, other(*j)), ds);
            add(&mut whole.grads[1], other(*j), query, ds);
            add(&mut whole.grads[2], other(*j), upstream, left * p);
        }
    }
    whole
}
