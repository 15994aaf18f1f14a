//! Attention on every layout is attention: special rows, shapes and dtypes, traffic by the formulas of numbers.md. What can be
//! enumerated is in `attention_everywhere.rs`.

mod attention {
    mod other_keys;
    pub mod problem;
}
mod common;

use attention::problem::{Problem, Whole, by_definition, flex, piece, rms, rounded, run, single, truth, whole, within};
use burn::tensor::{DType, Tensor};
use burn_sp::attention::{AttentionOptions, KvMove, Mask, attention};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::{SpDevice, SpTensor, launch};
use common::{config, contains, f64s, failure, mesh, noise, ranks, sequence};

/// Meshes, and how their ring moves keys and values.
fn meshes() -> Vec<(MeshShape, KvMove)> {
    let ulysses = [2, 3, 4, 8].map(|ranks| (mesh(1, 1, ranks), KvMove::Ring));
    let both = [(2, 2), (2, 4), (4, 2)].map(|(ring, ulysses)| mesh(1, ring, ulysses));
    let ring = [2, 3, 4, 8].map(|ranks| mesh(1, ranks, 1));
    let ring = both.into_iter().chain(ring).chain([mesh(2, 2, 1)]);
    let ring = ring.flat_map(|mesh| [(mesh, KvMove::Ring), (mesh, KvMove::Gather)]);
    ulysses
        .into_iter()
        .chain([(mesh(2, 1, 2), KvMove::Ring)])
        .chain(ring)
        .collect()
}

#[test]
fn a_length_of_1001_on_four_ranks() {
    let problem = Problem {
        batch: 1,
        dim: 8,
        ..Problem::new(1001, 6, 2, Mask::Causal)
    };
    let values = problem.values();
    let (truth, single) = (truth(&problem, &values), single(&problem, &values));
    for mesh in [mesh(1, 1, 4), mesh(1, 4, 1), mesh(1, 2, 2)] {
        for split in [Split::Contiguous, Split::Zigzag] {
            let found = run(&problem, &values, mesh, &split, &flex());
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
            for mask in [Mask::Causal, Mask::Full, Mask::Window { size: 20, sink: 3 }] {
                let problem = Problem {
                    dim: 16,
                    ..Problem::new(64, heads, kv_heads, mask)
                }
                .in_dtype(dtype);
                let values = rounded(&problem);
                let (truth, single) = (truth(&problem, &values), single(&problem, &values));
                for (mesh, kv) in meshes() {
                    let problem = problem.clone().moving(kv);
                    let found = run(&problem, &values, mesh, &Split::Zigzag, &flex());
                    within(&found, &single, &truth, dtype, &format!("{problem:?} on {mesh}"));
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
    for (mesh, kv) in [vec![(mesh(1, 1, 1), KvMove::Ring)], meshes()].concat() {
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
                    kv,
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

            for mask in [Mask::Full, Mask::Causal] {
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
                    &Problem::new(7, 2, 2, mask).moving(kv).options(),
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
    for (mesh, _) in meshes() {
        within(&run(mesh, DType::F32), &single, &truth, DType::F32, &format!("{mesh}"));
    }
}

/// Axes of one rank shard nothing, whatever a layout lists; sharded keys must be of the queries' tokens.
#[test]
fn keys_of_other_tokens() {
    let of = |device: &SpDevice, tokens: usize, layout: Layout| {
        let local: [usize; 4] = layout.local_shape(device.mesh()).try_into().expect("four dimensions");
        assert_eq!(layout.shape()[1], tokens);
        SpTensor::from_local(Tensor::<4>::ones(local, device.device()), layout, device)
    };
    ranks(mesh(1, 2, 2), |device| {
        // Whole keys beside queries whose samples are listed as sharded over one data-parallel rank, and heads over tp.
        let q = of(
            &device,
            7,
            sequence([2, 7, 4, 2], Split::Zigzag).shard(2, Axis::Tp, Split::Contiguous),
        );
        let keys = of(&device, 5, Layout::replicated([2, 5, 4, 2]));
        let out = attention(q, keys.clone(), keys, &AttentionOptions::default());
        assert_eq!(out.global_shape(), [2, 7, 4, 2]);
    });
    let report = failure(mesh(1, 2, 1), |device| {
        let q = of(&device, 8, sequence([1, 8, 2, 2], Split::Zigzag));
        let keys = of(&device, 4, sequence([1, 4, 2, 2], Split::Zigzag));
        attention(q, keys.clone(), keys, &AttentionOptions::default());
    });
    contains(
        &report,
        &[
            "attention: the tokens of 4 keys",
            "for 8 queries; give keys and values whole",
        ],
    );
}

/// numbers.md, on shapes that divide: elements sent by each rank and calls, forward and backward. Case 17 counts the hops.
#[test]
fn traffic_is_what_the_formulas_say() {
    let (batch, s, heads, kv_heads, dim) = (2, 16, 8, 4, 4);
    let meshes = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (4, 2)].map(|(ring, ulysses)| mesh(1, ring, ulysses));
    for (dtype, mesh, kv) in [DType::F32, DType::BF16].into_iter().flat_map(|dtype| {
        meshes
            .into_iter()
            .flat_map(move |mesh| [(dtype, mesh, KvMove::Ring), (dtype, mesh, KvMove::Gather)])
    }) {
        let problem = Problem {
            batch,
            ..Problem::new(s, heads, kv_heads, Mask::Causal)
        }
        .in_dtype(dtype)
        .moving(kv);
        let (h, kv_h) = (batch * heads * dim, batch * kv_heads * dim);
        let size = if dtype == DType::BF16 { 2 } else { 4 };
        let (r, u) = (mesh.ring, mesh.ulysses);
        let p = r * u;
        // (2 + 2g)(s h / P)(u - 1) / u, where h and g h are the widths of q and of k.
        let exchange = (2 * h + 2 * kv_h) * s / p * (u - 1) / u;
        // 2g (s h / u)(r - 1) / r
        let travel = 2 * kv_h * s / u * (r - 1) / r;
        let hops = (r - 1) as u64;
        let sum = |ops: &[(&str, u64, usize)]| {
            let of = |op: &(&str, u64, usize)| (op.0.to_owned(), op.1, op.2 as u64);
            let mut all: Vec<_> = ops.iter().filter(|op| op.2 > 0).map(of).collect();
            all.sort();
            all
        };
        // Where ranks share no head, gradients are exchanged no wider than the inputs.
        let exchanges = ("all_to_all", 2, exchange * size);
        // dk and dv are summed in f32, whatever the inputs are.
        let (forward, backward) = match kv {
            KvMove::Ring => (
                sum(&[exchanges, ("shift", hops, travel * size)]),
                sum(&[exchanges, ("shift", 2 * hops, travel * size + travel * 4)]),
            ),
            KvMove::Gather => (
                sum(&[exchanges, ("all_gather", 1, travel * size)]),
                sum(&[
                    exchanges,
                    ("all_gather", 1, travel * size),
                    ("reduce_scatter", 1, travel * 4),
                ]),
            ),
        };
        let results = ranks(mesh, |device| {
            let [q, k, v] = problem.shapes().map(|shape| {
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
            assert_eq!(found.0, forward, "forward on {mesh}, {kv:?}, rank {rank}, {dtype:?}");
            assert_eq!(found.1, backward, "backward on {mesh}, {kv:?}, rank {rank}, {dtype:?}");
        }
    }
}

/// Case 17: one rank's keys and values are ten times as large. In f64, against the definition.
#[test]
fn unequal_blocks_in_the_ring() {
    for (mask, tokens) in [(Mask::Full, 16), (Mask::Causal, 16), (Mask::Causal, 13)] {
        let problem = Problem::new(tokens, 4, 2, mask).in_dtype(DType::F64);
        let mut values = problem.values();
        // Of 4 ranks, contiguous, rank 1 owns the second quarter.
        let quarter = tokens.div_ceil(4);
        for values in &mut values[1..3] {
            for (index, x) in values.iter_mut().enumerate() {
                if (quarter..2 * quarter).contains(&(index / (2 * 4) % tokens)) {
                    *x *= 10.0;
                }
            }
        }
        let truth = by_definition(&problem, &values);
        for ring in [2, 4, 8] {
            for split in [Split::Contiguous, Split::Zigzag] {
                let found = run(&problem, &values, mesh(1, ring, 1), &split, &flex());
                for ((name, found), (_, truth)) in found.all().into_iter().zip(truth.all()) {
                    let error = rms(found, truth);
                    assert!(error < 1e-13, "ring {ring}, {split}: {name} is off by {error:e}");
                }
            }
        }
    }
}

/// Only some of q, k, v are trained: the others get no gradient, these the same as ever. Ranks stay in step.
#[test]
fn frozen_inputs_get_no_gradient() {
    let problem = Problem::new(7, 6, 3, Mask::Causal);
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
        let problem = Problem::new(7, heads, kv_heads, Mask::Causal);
        let values = problem.values();
        for (mesh, kv) in [vec![(mesh(1, 1, 1), KvMove::Ring)], meshes()].concat() {
            let problem = problem.clone().moving(kv);
            let plain = run(&problem, &values, mesh, &Split::Zigzag, &flex());
            let again = run(
                &problem,
                &values,
                mesh,
                &Split::Zigzag,
                &flex().gradient_checkpointing(),
            );
            for ((name, plain), (_, again)) in plain.all().into_iter().zip(again.all()) {
                assert_eq!(plain, again, "{mesh}: {name}");
            }
        }
    }
}
