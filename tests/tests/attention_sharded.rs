//! Attention on every layout is attention: outputs and gradients against f64 on one rank, visibility by counting, traffic
//! by the formulas of numbers.md.

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_sp::attention::{AttentionOptions, Mask, attention};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::{SpDevice, SpTensor, launch};
use common::{config, f64s, mesh, noise, ranks, sequence};

/// The problem: shapes, who sees whom, dtype.
#[derive(Clone, Copy, Debug)]
struct Problem {
    batch: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    causal: bool,
    dtype: DType,
}

impl Problem {
    fn new(tokens: usize, heads: usize, kv_heads: usize, causal: bool) -> Self {
        Self {
            batch: 2,
            tokens,
            heads,
            kv_heads,
            dim: 4,
            causal,
            dtype: DType::F32,
        }
    }

    fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.heads, self.dim]
    }

    fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.kv_heads, self.dim]
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions {
            mask: if self.causal { Mask::Causal } else { Mask::Full },
            ..AttentionOptions::default()
        }
    }

    fn in_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// q, k, v and the gradient of the output, as the dtype rounds them.
    fn values(&self) -> [Vec<f64>; 4] {
        let shapes = [self.q_shape(), self.k_shape(), self.k_shape(), self.q_shape()];
        let mut seed = 0;
        shapes.map(|shape| {
            seed += 1;
            noise(seed, shape.iter().product())
        })
    }
}

/// Whole tensors put together from what the ranks hold.
#[derive(Clone, Debug)]
struct Whole {
    out: Vec<f64>,
    grads: [Vec<f64>; 3],
}

impl Whole {
    fn all(&self) -> [(&'static str, &Vec<f64>); 4] {
        let [dq, dk, dv] = &self.grads;
        [("out", &self.out), ("dq", dq), ("dk", dk), ("dv", dv)]
    }
}

/// A rank's part of a tensor: where its elements stand in the whole one, and what they are.
type Piece = Vec<(usize, f64)>;

fn piece<const D: usize>(local: &Tensor<D>, layout: &Layout, device: &SpDevice) -> Piece {
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
fn whole(pieces: Vec<Piece>, elements: usize) -> Vec<f64> {
    let mut all = vec![None; elements];
    for (index, value) in pieces.into_iter().flatten() {
        assert!(all[index].replace(value).is_none(), "element {index} is held twice");
    }
    all.into_iter()
        .map(|value| value.expect("every element is held"))
        .collect()
}

/// Forward and backward on a mesh, put together.
fn run(problem: Problem, values: &[Vec<f64>; 4], mesh: MeshShape, split: &Split, device: &Device) -> Whole {
    let mut results = launch(&config(mesh), device, |device| {
        let (ql, kl) = (
            sequence(problem.q_shape(), split.clone()),
            sequence(problem.k_shape(), split.clone()),
        );
        let local = |values: &[f64], layout: &Layout| {
            let shape: [usize; 4] = layout.shape().to_vec().try_into().expect("four dimensions");
            let whole = common::tensor(values, shape, problem.dtype, device.device());
            device.distribute(whole, layout).into_local().detach()
        };
        let leaves = [
            local(&values[0], &ql).require_grad(),
            local(&values[1], &kl).require_grad(),
            local(&values[2], &kl).require_grad(),
        ];
        let [q, k, v] = [(0, &ql), (1, &kl), (2, &kl)]
            .map(|(index, layout)| SpTensor::from_local(leaves[index].clone(), layout.clone(), &device));
        let out = attention(q, k, v, &problem.options());
        assert_eq!(*out.layout(), ql);
        let grads = (out.local().clone() * local(&values[3], &ql)).sum().backward();
        let mut pieces = vec![piece(out.local(), &ql, &device)];
        for (leaf, layout) in leaves.iter().zip([&ql, &kl, &kl]) {
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
    let mut take = |shape: [usize; 4]| {
        let pieces = results.iter_mut().map(|pieces| pieces.remove(0)).collect();
        whole(pieces, shape.iter().product())
    };
    let out = take(problem.q_shape());
    let grads = [
        take(problem.q_shape()),
        take(problem.k_shape()),
        take(problem.k_shape()),
    ];
    Whole { out, grads }
}

fn flex() -> Device {
    Device::flex().autodiff()
}

/// One rank in f64, on the inputs that `problem`'s dtype has.
fn truth(problem: Problem, values: &[Vec<f64>; 4]) -> Whole {
    run(
        problem.in_dtype(DType::F64),
        values,
        MeshShape::default(),
        &Split::Contiguous,
        &flex(),
    )
}

/// The inputs as their dtype rounds them.
fn rounded(problem: Problem) -> [Vec<f64>; 4] {
    let device = Device::flex();
    problem.values().map(|values| {
        let count = values.len();
        f64s(&common::tensor(&values, [count], problem.dtype, &device))
    })
}

fn rms(found: &[f64], truth: &[f64]) -> f64 {
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
fn within(found: &Whole, single: &Whole, truth: &Whole, dtype: DType, context: &str) {
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

fn meshes() -> Vec<MeshShape> {
    let ulysses = [2, 3, 4, 8].map(|ranks| mesh(1, 1, ranks));
    let ring = [2, 3, 4, 8].map(|ranks| mesh(1, ranks, 1));
    let both = [
        mesh(1, 2, 2),
        mesh(1, 2, 4),
        mesh(1, 4, 2),
        mesh(2, 1, 2),
        mesh(2, 2, 1),
    ];
    ulysses.into_iter().chain(ring).chain(both).collect()
}

fn splits() -> [Split; 2] {
    [Split::Contiguous, Split::Zigzag]
}

const HEADS: [(usize, usize); 8] = [(6, 6), (6, 3), (6, 2), (6, 1), (4, 2), (2, 2), (2, 1), (1, 1)];

/// What f64 says, by the definition: scores, softmax, and its derivative, in loops.
fn by_definition(problem: Problem, values: &[Vec<f64>; 4]) -> Whole {
    let [b, s, h, d] = problem.q_shape();
    let (g, ratio) = (problem.kv_heads, problem.heads / problem.kv_heads);
    let scale = 1.0 / (d as f64).sqrt();
    let [q, k, v, dout] = values;
    let row = |values: &'_ [f64], heads: usize, b: usize, s_: usize, h: usize| {
        let start = ((b * s + s_) * heads + h) * d;
        values[start..start + d].to_vec()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut whole = Whole {
        out: vec![0.0; q.len()],
        grads: [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]],
    };
    let add = |into: &mut [f64], heads: usize, at: [usize; 3], what: &[f64], factor: f64| {
        let start = ((at[0] * s + at[1]) * heads + at[2]) * d;
        for (into, what) in into[start..start + d].iter_mut().zip(what) {
            *into += factor * what;
        }
    };
    for (b, h, i) in (0..b).flat_map(|b| (0..h).flat_map(move |h| (0..s).map(move |i| (b, h, i)))) {
        let kv = h / ratio;
        let keys: Vec<usize> = (0..s).filter(|j| !problem.causal || *j <= i).collect();
        let query = row(q, problem.heads, b, i, h);
        let scores: Vec<f64> = keys
            .iter()
            .map(|j| (scale * dot(&query, &row(k, g, b, *j, kv))).exp())
            .collect();
        let sum: f64 = scores.iter().sum();
        let upstream = row(dout, problem.heads, b, i, h);
        let arrived: Vec<f64> = keys.iter().map(|j| dot(&upstream, &row(v, g, b, *j, kv))).collect();
        let mean: f64 = scores.iter().zip(&arrived).map(|(p, a)| p / sum * a).sum();
        for ((j, score), arrived) in keys.iter().zip(&scores).zip(&arrived) {
            let p = score / sum;
            let ds = p * (arrived - mean) * scale;
            add(&mut whole.out, problem.heads, [b, i, h], &row(v, g, b, *j, kv), p);
            add(&mut whole.grads[0], problem.heads, [b, i, h], &row(k, g, b, *j, kv), ds);
            add(&mut whole.grads[1], g, [b, *j, kv], &query, ds);
            add(&mut whole.grads[2], g, [b, *j, kv], &upstream, p);
        }
    }
    whole
}

#[test]
fn one_rank_in_f64_is_the_definition() {
    for causal in [false, true] {
        for tokens in [1, 2, 7, 16] {
            for (heads, kv_heads) in HEADS {
                let problem = Problem::new(tokens, heads, kv_heads, causal).in_dtype(DType::F64);
                let values = problem.values();
                let (found, expected) = (truth(problem, &values), by_definition(problem, &values));
                for ((name, found), (_, expected)) in found.all().into_iter().zip(expected.all()) {
                    let worst = found
                        .iter()
                        .zip(expected)
                        .map(|(a, b)| (a - b).abs())
                        .fold(0.0, f64::max);
                    assert!(worst < 1e-13, "{problem:?}: {name} is off by {worst:e}");
                }
            }
        }
    }
}

/// Cases 20, 21, 26 and 29 among them: 7 and 2 tokens on 2 to 8 ranks, 6 heads on 4, fewer heads than ranks.
#[test]
fn every_layout_gives_the_same_attention() {
    for tokens in [2, 7, 16] {
        for causal in [false, true] {
            for (heads, kv_heads) in HEADS {
                let problem = Problem::new(tokens, heads, kv_heads, causal);
                let values = problem.values();
                let truth = truth(problem, &values);
                let single = run(problem, &values, MeshShape::default(), &Split::Contiguous, &flex());
                for mesh in meshes() {
                    for split in splits() {
                        let found = run(problem, &values, mesh, &split, &flex());
                        within(
                            &found,
                            &single,
                            &truth,
                            DType::F32,
                            &format!("{problem:?} on {mesh}, {split}"),
                        );
                    }
                }
            }
        }
    }
}

/// In f64 too: nothing on the way is narrower.
#[test]
fn f64_stays_f64() {
    let problem = Problem::new(7, 6, 3, true).in_dtype(DType::F64);
    let values = problem.values();
    let truth = by_definition(problem, &values);
    for mesh in meshes() {
        for split in splits() {
            let found = run(problem, &values, mesh, &split, &flex());
            for ((name, found), (_, truth)) in found.all().into_iter().zip(truth.all()) {
                let error = rms(found, truth);
                assert!(error < 1e-14, "{mesh}, {split}: {name} is off by {error:e}");
            }
        }
    }
}

#[test]
fn a_length_of_1001_on_four_ranks() {
    let problem = Problem {
        batch: 1,
        dim: 8,
        ..Problem::new(1001, 6, 2, true)
    };
    let values = problem.values();
    let truth = truth(problem, &values);
    let single = run(problem, &values, MeshShape::default(), &Split::Contiguous, &flex());
    for mesh in [mesh(1, 1, 4), mesh(1, 4, 1), mesh(1, 2, 2)] {
        for split in splits() {
            let found = run(problem, &values, mesh, &split, &flex());
            within(
                &found,
                &single,
                &truth,
                DType::F32,
                &format!("{problem:?} on {mesh}, {split}"),
            );
        }
    }
}

/// Case 28.
#[test]
fn narrow_inputs_lose_no_more_on_many_ranks() {
    for dtype in [DType::BF16, DType::F16] {
        for (heads, kv_heads) in [(8, 8), (8, 2), (6, 1)] {
            let problem = Problem {
                dim: 16,
                ..Problem::new(64, heads, kv_heads, true)
            }
            .in_dtype(dtype);
            let values = rounded(problem);
            let truth = truth(problem, &values);
            let single = run(problem, &values, MeshShape::default(), &Split::Contiguous, &flex());
            for mesh in meshes() {
                let found = run(problem, &values, mesh, &Split::Zigzag, &flex());
                within(&found, &single, &truth, dtype, &format!("{problem:?} on {mesh}"));
            }
        }
    }
}

/// O1, sharper: with q = 0 and one-hot values, the output of a query is one over its count at every key it sees, and 0
/// elsewhere. Cases 19 (masks that exist), 20 and 21.
#[test]
fn every_query_sees_exactly_its_keys() {
    for tokens in [1usize, 2, 7, 8] {
        for causal in [false, true] {
            for mesh in [vec![mesh(1, 1, 1)], meshes()].concat() {
                for split in splits() {
                    ranks(mesh, |device| {
                        let shapes = [[2, tokens, 3, 2], [2, tokens, 3, 2], [2, tokens, 3, tokens]];
                        let one_hot: Vec<f64> = (0..2 * tokens * 3 * tokens)
                            .map(|i| f64::from(u8::from(i / (3 * tokens) % tokens == i % tokens)))
                            .collect();
                        let zeros = vec![0.0; 2 * tokens * 3 * 2];
                        // Keys do not matter, whatever they are.
                        let k = noise(3, 2 * tokens * 3 * 2);
                        let [q, k, v] = [(0, &zeros), (1, &k), (2, &one_hot)].map(|(index, values)| {
                            let whole = common::tensor(values, shapes[index], DType::F32, device.device());
                            device.distribute(whole, &sequence(shapes[index], split.clone()))
                        });
                        let options = Problem::new(tokens, 3, 3, causal).options();
                        let out = attention(q, k, v, &options);
                        let positions: Vec<usize> = out.positions(1).iter().collect();
                        let found = f64s(out.local());
                        for (index, row) in found.chunks(tokens).enumerate() {
                            let query = positions[index / 3 % positions.len()];
                            let count = if causal { query + 1 } else { tokens };
                            let context = format!("{tokens} tokens on {mesh}, {split}, query {query}: {row:?}");
                            assert_eq!((1.0 / row[0]).round() as usize, count, "{context}");
                            for (key, weight) in row.iter().enumerate() {
                                let seen = !causal || key <= query;
                                let expected = if seen { 1.0 / count as f64 } else { 0.0 };
                                assert!((weight - expected).abs() <= 1e-7, "{context}, key {key}");
                            }
                        }
                    });
                }
            }
        }
    }
}

/// Case 25: query head h reads key/value head h / 2 on every rank, and the copies' gradients are added.
#[test]
fn shared_heads_are_repeated_not_tiled() {
    let constants = [3.0, 5.0];
    for mesh in [
        mesh(1, 1, 1),
        mesh(1, 1, 4),
        mesh(1, 4, 1),
        mesh(1, 2, 2),
        mesh(1, 1, 3),
    ] {
        ranks(mesh, |device| {
            let (q_shape, k_shape) = ([1, 8, 4, 2], [1, 8, 2, 2]);
            let values: Vec<f64> = (0..32).map(|i| constants[i / 2 % 2]).collect();
            let leaf = |values: &[f64], shape: [usize; 4]| {
                let whole = common::tensor(values, shape, DType::F32, device.device());
                device
                    .distribute(whole, &sequence(shape, Split::Contiguous))
                    .into_local()
                    .detach()
                    .require_grad()
            };
            let sp = |local: &Tensor<4>, shape: [usize; 4]| {
                SpTensor::from_local(local.clone(), sequence(shape, Split::Contiguous), &device)
            };
            let (q, k, v) = (
                leaf(&[0.0; 64], q_shape),
                leaf(&[0.0; 32], k_shape),
                leaf(&values, k_shape),
            );
            let full = AttentionOptions {
                mask: Mask::Full,
                ..AttentionOptions::default()
            };
            let out = attention(sp(&q, q_shape), sp(&k, k_shape), sp(&v, k_shape), &full);
            for (index, found) in f64s(out.local()).into_iter().enumerate() {
                assert_eq!(found, constants[index / 2 % 4 / 2], "{mesh}, rank {}", device.rank());
            }
            let grads = out.local().clone().sum().backward();
            // 8 queries of weight 1/8 each, from two query heads.
            let dv = f64s(&v.grad(&grads).expect("a gradient"));
            assert_eq!(dv, vec![2.0; dv.len()], "{mesh}, rank {}", device.rank());
        });
    }
}

/// Case 27: equal scores of -1e6 weigh alike; without keys the output and all gradients are 0.
#[test]
fn extreme_rows() {
    for mesh in [vec![mesh(1, 1, 1)], meshes()].concat() {
        ranks(mesh, |device| {
            let shape = [2, 7, 2, 1];
            let ids: Vec<f64> = (0..28).map(|i| f64::from(i / 2 % 7)).collect();
            let sp = |values: &[f64]| {
                let whole = common::tensor(values, shape, DType::F32, device.device());
                device.distribute(whole, &sequence(shape, Split::Zigzag))
            };
            let out = attention(
                sp(&[1000.0; 28]),
                sp(&[-1000.0; 28]),
                sp(&ids),
                &AttentionOptions {
                    scale: Some(1.0),
                    ..AttentionOptions::default()
                },
            );
            let positions: Vec<usize> = out.positions(1).iter().collect();
            for (index, found) in f64s(out.local()).into_iter().enumerate() {
                let query = positions[index / 2 % positions.len()] as f64;
                assert!(
                    (found - query / 2.0).abs() < 1e-6,
                    "{mesh}: the mean of 0..={query} is not {found}"
                );
            }

            for causal in [false, true] {
                let q = common::tensor(&noise(1, 28), shape, DType::F32, device.device());
                let q = device
                    .distribute(q, &sequence(shape, Split::Zigzag))
                    .into_local()
                    .detach()
                    .require_grad();
                let samples = q.dims()[0];
                let none = Tensor::<4>::zeros([samples, 0, 2, 1], device.device()).require_grad();
                let layout = Layout::replicated([2, 0, 2, 1]).shard(0, Axis::Dp, Split::Contiguous);
                let keys = SpTensor::from_local(none.clone(), layout, &device);
                let out = attention(
                    SpTensor::from_local(q.clone(), sequence(shape, Split::Zigzag), &device),
                    keys.clone(),
                    keys,
                    &Problem::new(7, 2, 2, causal).options(),
                );
                assert!(
                    f64s(out.local()).iter().all(|x| x.to_bits() == 0.0f64.to_bits()),
                    "{mesh}"
                );
                let grads = out.local().clone().sum().backward();
                assert!(
                    f64s(&q.grad(&grads).expect("a gradient")).iter().all(|x| *x == 0.0),
                    "{mesh}"
                );
                assert_eq!(none.grad(&grads).expect("a gradient").dims(), [samples, 0, 2, 1]);
            }
        });
    }
}

/// Keys and values that every rank holds whole: no traffic, and their gradients are terms that add up.
#[test]
fn cross_attention_over_replicated_keys() {
    let (q_shape, k_shape) = ([2, 7, 6, 4], [2, 5, 3, 4]);
    let values = [
        noise(1, 2 * 7 * 6 * 4),
        noise(2, 2 * 5 * 3 * 4),
        noise(3, 2 * 5 * 3 * 4),
        noise(4, 2 * 7 * 6 * 4),
    ];
    let full = AttentionOptions {
        mask: Mask::Full,
        ..AttentionOptions::default()
    };
    let run = |mesh: MeshShape, dtype: DType| {
        let results = ranks(mesh, |device| {
            let whole = |index: usize, shape| common::tensor::<4>(&values[index], shape, dtype, device.device());
            let layout = sequence(q_shape, Split::Zigzag);
            let kv_layout = Layout::replicated(k_shape).shard(0, Axis::Dp, Split::Contiguous);
            let local = |whole, layout| {
                device
                    .distribute::<4, _>(whole, layout)
                    .into_local()
                    .detach()
                    .require_grad()
            };
            let q = local(whole(0, q_shape), &layout);
            let [k, v] = [1, 2].map(|index| local(whole(index, k_shape), &kv_layout));
            device.mesh().world().reset_statistics();
            let kv = |leaf: &Tensor<4>| SpTensor::from_local(leaf.clone(), kv_layout.clone(), &device);
            let out = attention(
                SpTensor::from_local(q.clone(), layout.clone(), &device),
                kv(&k),
                kv(&v),
                &full,
            );
            let dout = device.distribute(whole(3, q_shape), &layout).into_local().detach();
            let grads = (out.local().clone() * dout).sum().backward();
            assert!(
                device
                    .mesh()
                    .world()
                    .statistics()
                    .iter()
                    .all(|counter| counter.calls == 0)
            );
            let term = |leaf: &Tensor<4>| {
                let sum = [Axis::Ring, Axis::Ulysses]
                    .into_iter()
                    .fold(kv_layout.clone(), Layout::partial);
                f64s(
                    SpTensor::from_local(leaf.grad(&grads).expect("a gradient"), sum, &device)
                        .gather()
                        .local(),
                )
            };
            let whole_kv = [term(&k), term(&v)];
            let own = [
                piece(out.local(), &layout, &device),
                piece(&q.grad(&grads).expect("a gradient"), &layout, &device),
            ];
            (own, whole_kv)
        });
        let kv = results[0].1.clone();
        assert!(
            results.iter().all(|result| result.1 == kv),
            "{mesh}: all ranks hold the same sum"
        );
        let [out, dq] = [0, 1].map(|index| {
            whole(
                results.iter().map(|result| result.0[index].clone()).collect(),
                2 * 7 * 6 * 4,
            )
        });
        let [dk, dv] = kv;
        Whole {
            out,
            grads: [dq, dk, dv],
        }
    };
    let truth = run(MeshShape::default(), DType::F64);
    let single = run(MeshShape::default(), DType::F32);
    for mesh in meshes() {
        within(&run(mesh, DType::F32), &single, &truth, DType::F32, &format!("{mesh}"));
    }
}

/// numbers.md, on shapes that divide: elements sent by each rank and calls, forward and backward.
#[test]
fn traffic_is_what_the_formulas_say() {
    let (batch, s, heads, kv_heads, dim) = (2, 16, 8, 4, 4);
    for dtype in [DType::F32, DType::BF16] {
        let problem = Problem {
            batch,
            ..Problem::new(s, heads, kv_heads, true)
        }
        .in_dtype(dtype);
        let (h, kv_h) = (batch * heads * dim, batch * kv_heads * dim);
        let size = if dtype == DType::BF16 { 2 } else { 4 };
        for mesh in [
            mesh(1, 1, 2),
            mesh(1, 1, 4),
            mesh(1, 2, 1),
            mesh(1, 4, 1),
            mesh(1, 2, 2),
            mesh(1, 4, 2),
        ] {
            let (r, u) = (mesh.ring, mesh.ulysses);
            let p = r * u;
            // (2 + 2g)(s h / P)(u - 1) / u, where h and g h are the widths of q and of k.
            let exchange = (2 * h + 2 * kv_h) * s / p * (u - 1) / u;
            // 2g (s h / u)(r - 1) / r
            let gather = 2 * kv_h * s / u * (r - 1) / r;
            let sum = |ops: &[(&str, u64, usize, usize)]| {
                let of = |op: &(&str, u64, usize, usize)| (op.0.to_owned(), op.1, (op.2 * op.3) as u64);
                let mut all: Vec<_> = ops.iter().filter(|op| op.2 > 0).map(of).collect();
                all.sort();
                all
            };
            let forward = sum(&[("all_to_all", 2, exchange, size), ("all_gather", 1, gather, size)]);
            // dk and dv are summed in f32, whatever the inputs are.
            let backward = sum(&[
                ("all_to_all", 2, exchange, size),
                ("all_gather", 1, gather, size),
                ("reduce_scatter", 1, gather, 4),
            ]);
            let results = ranks(mesh, |device| {
                let [q, k, v] = [problem.q_shape(), problem.k_shape(), problem.k_shape()].map(|shape| {
                    let layout = sequence(shape, Split::Zigzag);
                    let local: [usize; 4] = layout.local_shape(device.mesh()).try_into().expect("four dimensions");
                    let leaf = Tensor::<4>::ones(local, (device.device(), dtype)).require_grad();
                    SpTensor::from_local(leaf, layout, &device)
                });
                let world = device.mesh().world().clone();
                let calls = || {
                    let counters = world.statistics().into_iter().filter(|counter| counter.calls > 0);
                    let mut calls: Vec<_> = counters
                        .map(|counter| (counter.op, counter.calls, counter.bytes_sent))
                        .collect();
                    calls.sort();
                    world.reset_statistics();
                    calls
                };
                world.reset_statistics();
                let out = attention(q, k, v, &problem.options());
                let forward = calls();
                out.local().clone().sum().backward();
                (forward, calls())
            });
            for (rank, found) in results.into_iter().enumerate() {
                assert_eq!(found.0, forward, "forward on {mesh}, rank {rank}, {dtype:?}");
                // Where ranks share no head, gradients are exchanged no wider than the inputs.
                assert_eq!(found.1, backward, "backward on {mesh}, rank {rank}, {dtype:?}");
            }
        }
    }
}

/// Only some of q, k, v are trained: the others get no gradient, these the same as ever. Ranks stay in step.
#[test]
fn frozen_inputs_get_no_gradient() {
    let problem = Problem::new(7, 6, 3, true);
    let values = problem.values();
    for device in [flex(), flex().gradient_checkpointing()] {
        for mesh in [mesh(1, 1, 1), mesh(1, 1, 4), mesh(1, 4, 1), mesh(1, 2, 2)] {
            let results = launch(&config(mesh), &device, |device| {
                let shapes = [problem.q_shape(), problem.k_shape(), problem.k_shape()];
                let grads = |tracked: usize| {
                    let leaves = [0, 1, 2].map(|index| {
                        let whole = common::tensor::<4>(&values[index], shapes[index], DType::F32, device.device());
                        let local = device
                            .distribute(whole, &sequence(shapes[index], Split::Zigzag))
                            .into_local()
                            .detach();
                        if tracked >> index & 1 == 1 {
                            local.require_grad()
                        } else {
                            local
                        }
                    });
                    let [q, k, v] = [0, 1, 2].map(|index| {
                        SpTensor::from_local(leaves[index].clone(), sequence(shapes[index], Split::Zigzag), &device)
                    });
                    let out = attention(q, k, v, &problem.options());
                    let dout = device.distribute(
                        common::tensor::<4>(&values[3], shapes[0], DType::F32, device.device()),
                        &sequence(shapes[0], Split::Zigzag),
                    );
                    // Something else is trained too, so that there is a graph at all.
                    let other = Tensor::<1>::ones([1], device.device()).require_grad();
                    let loss = (out.local().clone() * dout.into_local()).sum() * other;
                    let grads = loss.backward();
                    (
                        f64s(out.local()),
                        leaves.map(|leaf| leaf.grad(&grads).map(|grad| f64s(&grad))),
                    )
                };
                let (all_out, all) = grads(7);
                for tracked in 0..7 {
                    let (out, some) = grads(tracked);
                    assert_eq!(out, all_out);
                    for index in 0..3 {
                        let expected = all[index].clone().filter(|_| tracked >> index & 1 == 1);
                        assert_eq!(some[index], expected, "{mesh}, tracked {tracked:03b}, input {index}");
                    }
                }
            });
            results.unwrap_or_else(|error| panic!("{mesh}: {error}"));
        }
    }
}

/// Burn's gradient checkpointing computes some things again; never a collective, and to the same bits.
#[test]
fn gradient_checkpointing_changes_nothing() {
    for (heads, kv_heads) in [(6, 6), (6, 2), (2, 1)] {
        let problem = Problem::new(7, heads, kv_heads, true);
        let values = problem.values();
        for mesh in [vec![mesh(1, 1, 1)], meshes()].concat() {
            let plain = run(problem, &values, mesh, &Split::Zigzag, &flex());
            let again = run(problem, &values, mesh, &Split::Zigzag, &flex().gradient_checkpointing());
            for ((name, plain), (_, again)) in plain.all().into_iter().zip(again.all()) {
                assert_eq!(plain, again, "{mesh}: {name}");
            }
        }
    }
}
