//! Scale of losses and gradients: cases 1 to 9, exactly; and PyTorch's cross entropy with uneven counts.

mod common;

use burn::module::{Module, Param};
use burn::optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::{LossShare, ParamLayouts, sum_gradients, token_loss, valid_tokens};
use burn_sp::{SpDevice, SpTensor};
use burn_sp_models::transformer::next_token_labels;
use burn_sp_tests::Fixture;
use common::{f64s, mesh, ranks, sequence, tensor};

const IGNORED: i64 = -100;

#[derive(Module, Debug)]
struct Weight {
    w: Param<Tensor<1>>,
}

impl Weight {
    fn new(device: &SpDevice) -> Self {
        Self {
            w: Param::from_tensor(Tensor::ones([1], device.device())),
        }
    }

    /// `y_t = w t`.
    fn times(&self, t: &SpTensor<2>) -> SpTensor<2> {
        t.clone().tokenwise(|t| t * self.w.val().reshape([1, 1]))
    }
}

/// Every split of four ranks, also with tokens that two ranks hold alike (tp), and smaller meshes.
fn meshes() -> Vec<MeshShape> {
    let mut meshes = vec![mesh(1, 1, 1), mesh(1, 2, 1), mesh(1, 1, 2), mesh(2, 1, 1)];
    meshes.extend([
        mesh(4, 1, 1),
        mesh(2, 2, 1),
        mesh(2, 1, 2),
        mesh(1, 4, 1),
        mesh(1, 2, 2),
        mesh(1, 1, 4),
    ]);
    meshes.extend([
        MeshShape::tp(2),
        MeshShape { tp: 2, ..mesh(1, 1, 2) },
        MeshShape { tp: 2, ..mesh(1, 2, 1) },
    ]);
    meshes
}

fn splits() -> [Split; 2] {
    [Split::Contiguous, Split::Zigzag]
}

/// Tokens 0..B*S, by their number.
fn numbers(device: &SpDevice, shape: [usize; 2], split: Split) -> SpTensor<2> {
    let values: Vec<f64> = (0..shape[0] * shape[1]).map(|t| t as f64).collect();
    device.distribute(
        common::tensor(&values, shape, DType::F32, device.device()),
        &sequence(shape, split),
    )
}

fn labels(device: &SpDevice, labels: &[i64], shape: [usize; 2], split: Split) -> SpTensor<2, Int> {
    let whole = Tensor::<2, Int>::from_data(TensorData::new(labels.to_vec(), shape), device.device());
    device.distribute(whole, &sequence(shape, split))
}

fn gradient(weight: &Weight, loss: &LossShare, device: &SpDevice) -> [f64; 2] {
    let grads = GradientsParams::from_grads(loss.backward(), weight);
    let term = grads.get::<1>(weight.w.id).map_or(0.0, |term| f64s(&term)[0]);
    let grads = sum_gradients(weight, grads, &ParamLayouts::replicated(), device.mesh());
    [term, f64s(&grads.get::<1>(weight.w.id).expect("a gradient"))[0]]
}

/// Cases 1 and 2: O3 on every mesh; the step moves the weight by the gradient.
#[test]
fn a_scalar_weight_has_the_mean_token_as_gradient() {
    for mesh in meshes() {
        for shape in [[1, 8], [2, 4], [4, 2], [8, 1]] {
            for split in splits() {
                let found = ranks(mesh, |device| {
                    let weight = Weight::new(&device);
                    let loss = LossShare::mean(weight.times(&numbers(&device, shape, split.clone())));
                    let grads = GradientsParams::from_grads(loss.backward(), &weight);
                    let grads = sum_gradients(&weight, grads, &ParamLayouts::replicated(), device.mesh());
                    let dw = f64s(&grads.get::<1>(weight.w.id).expect("a gradient"))[0];
                    let moved = SgdConfig::new().init().step(1.0, weight, grads);
                    [loss.value(), dw, f64s(&moved.w.val())[0]]
                });
                assert_eq!(
                    found,
                    vec![[3.5, 3.5, 1.0 - 3.5]; mesh.ranks()],
                    "{mesh}, {shape:?}, {split}"
                );
            }
        }
    }
}

#[test]
fn partial_gradients_are_each_ranks_own_tokens() {
    let found = ranks(MeshShape::ulysses(4), |device| {
        let weight = Weight::new(&device);
        let loss = LossShare::mean(weight.times(&numbers(&device, [1, 8], Split::Contiguous)));
        gradient(&weight, &loss, &device)
    });
    assert_eq!(found, [[0.125, 3.5], [0.625, 3.5], [1.125, 3.5], [1.625, 3.5]]);
}

/// Case 2.
#[test]
fn a_token_loss_of_one_is_reported_as_one() {
    for mesh in meshes() {
        let found = ranks(mesh, |device| {
            let ones = numbers(&device, [4, 8], Split::Zigzag).tokenwise(|t| t.ones_like());
            LossShare::mean(ones).value()
        });
        assert_eq!(found, vec![1.0; mesh.ranks()], "{mesh}");
    }
}

/// Zero logits of four classes: token losses are `ln 4`, and the identity as output weight shows `dlogits`.
fn zero_logits(
    device: &SpDevice,
    targets: &SpTensor<2, Int>,
    weights: Option<&SpTensor<2>>,
    dtype: DType,
) -> ZeroLogits {
    let shape = targets.global_shape();
    let split = targets.layout().shards(1)[0].1.clone();
    let layout = sequence([shape[0], shape[1], 4], split);
    let leaf = Tensor::<3>::zeros(
        layout.local_shape(device.mesh()).try_into().unwrap_or([0; 3]),
        (device.device(), dtype),
    );
    let leaf = leaf.require_grad();
    let count = valid_tokens([targets]);
    let hidden = SpTensor::from_local(leaf.clone(), layout, device);
    let identity = Tensor::<2>::eye(4, device.device()).cast(dtype);
    let loss = token_loss(hidden, identity, targets, weights, count);
    let grads = loss.backward();
    ZeroLogits {
        count,
        loss: loss.value(),
        dlogits: f64s(&leaf.grad(&grads).expect("a gradient")),
    }
}

struct ZeroLogits {
    count: u64,
    loss: f64,
    dlogits: Vec<f64>,
}

/// `(1/4 - onehot) / count` for the labels that this rank holds.
fn expected_dlogits(targets: &SpTensor<2, Int>, count: u64) -> Vec<f64> {
    let row = |label: i64| {
        let of = move |class: i64| match label {
            IGNORED => 0.0,
            _ => (0.25 - f64::from(u8::from(class == label))) / count as f64,
        };
        (0..4).map(of).collect::<Vec<_>>()
    };
    targets.local().to_data().iter::<i64>().flat_map(row).collect()
}

fn close(found: f64, expected: f64, dtype: DType) -> bool {
    let epsilon = if dtype == DType::F64 {
        f64::EPSILON
    } else {
        f64::from(f32::EPSILON)
    };
    (found - expected).abs() <= 4.0 * epsilon * expected.abs()
}

/// Cases 3 and 4: O4 with uneven counts, a rank without any, and none at all.
#[test]
fn zero_logits_weigh_every_valid_token_alike() {
    let i = IGNORED;
    let batches: [([i64; 8], u64); 4] = [
        // 3 valid on the first half, 1 on the second.
        ([1, 2, 3, i, i, 0, i, i], 4),
        // One half ignored.
        ([1, 2, 3, 0, i, i, i, i], 4),
        // Most ranks have none.
        ([i, i, i, i, i, i, 2, i], 1),
        ([i; 8], 0),
    ];
    for dtype in [DType::F32, DType::F64] {
        for mesh in meshes() {
            // With 2 tokens a sample some ranks own none.
            for shape in [[1, 8], [2, 4], [4, 2]] {
                for split in splits() {
                    for (batch, count) in &batches {
                        ranks(mesh, |device| {
                            let targets = labels(&device, batch, shape, split.clone());
                            let found = zero_logits(&device, &targets, None, dtype);
                            let context = format!("{mesh}, {shape:?}, {split}, {batch:?}, {dtype:?}");
                            assert_eq!(found.count, *count, "{context}");
                            let loss = if *count == 0 { 0.0 } else { 4f64.ln() };
                            assert!(close(found.loss, loss, dtype), "{context}: loss {}", found.loss);
                            // Tokens that two ranks hold alike count on the first of them only.
                            let keeps = device.mesh().coordinate(burn_sp::layout::Axis::Tp) == 0;
                            let mut expected = expected_dlogits(&targets, (*count).max(1));
                            if !keeps {
                                expected.fill(0.0);
                            }
                            assert_eq!(found.dlogits, expected, "{context}, rank {}", device.rank());
                        });
                    }
                }
            }
        }
    }
}

/// Case 8.
#[test]
fn token_weights_multiply_their_tokens() {
    for mesh in [
        mesh(1, 1, 1),
        mesh(1, 1, 2),
        mesh(1, 2, 1),
        mesh(2, 1, 1),
        mesh(2, 2, 1),
        mesh(1, 2, 2),
    ] {
        for split in splits() {
            ranks(mesh, |device| {
                let targets = labels(&device, &[1; 10], [2, 5], split.clone());
                // Token 5b + t weighs 1 + 10b + t.
                let weights =
                    numbers(&device, [2, 5], split.clone()).tokenwise(|n| (n.clone() / 5.0).floor() * 5.0 + n + 1.0);
                let found = zero_logits(&device, &targets, Some(&weights), DType::F32);
                assert_eq!(found.count, 10);
                assert!(close(found.loss, 8.0 * 4f64.ln(), DType::F32), "{mesh}: {}", found.loss);
            });
        }
    }
}

/// Case 5: labels are shifted before the sequence is cut.
#[test]
fn labels_keep_the_successor_across_ranks() {
    let of = |split: Split| {
        ranks(MeshShape::ulysses(2), |device| {
            let ids = Tensor::<1, Int>::arange(0..8, device.device()).reshape([1, 8]);
            let layout = sequence([1, 8], split.clone());
            let local = |whole: Tensor<2, Int>| {
                device
                    .distribute(whole, &layout)
                    .local()
                    .to_data()
                    .iter::<i64>()
                    .collect::<Vec<_>>()
            };
            (local(ids.clone()), local(next_token_labels(ids)))
        })
    };
    assert_eq!(
        of(Split::Contiguous),
        [
            (vec![0, 1, 2, 3], vec![1, 2, 3, 4]),
            (vec![4, 5, 6, 7], vec![5, 6, 7, IGNORED])
        ]
    );
    assert_eq!(
        of(Split::Zigzag),
        [
            (vec![0, 1, 6, 7], vec![1, 2, 7, IGNORED]),
            (vec![2, 3, 4, 5], vec![3, 4, 5, 6])
        ]
    );
}

/// Case 6: packed documents of 3 and 5 tokens; the last token of each has no label, at any number of ranks.
#[test]
fn labels_end_with_their_document() {
    let i = IGNORED;
    let expected = [1, 2, i, 4, 5, 6, 7, i];
    for mesh in meshes().into_iter().filter(|mesh| mesh.dp == 1) {
        for split in splits() {
            ranks(mesh, |device| {
                let ids = Tensor::<1, Int>::arange(0..8, device.device()).reshape([1, 8]);
                let documents = [ids.clone().narrow(1, 0, 3), ids.narrow(1, 3, 5)].map(next_token_labels);
                let packed = Tensor::cat(documents.to_vec(), 1);
                let sharded = device.distribute(packed, &sequence([1, 8], split.clone()));
                assert_eq!(valid_tokens([&sharded]), 6);
                let mine: Vec<i64> = sharded.positions(1).iter().map(|at| expected[at]).collect();
                assert_eq!(sharded.local().to_data().iter::<i64>().collect::<Vec<_>>(), mine);
                let whole = sharded.gather().into_local();
                assert_eq!(whole.to_data().iter::<i64>().collect::<Vec<_>>(), expected);
            });
        }
    }
}

/// Case 7: an auxiliary loss counts once, whatever the mesh.
#[test]
fn an_auxiliary_loss_has_one_gradient() {
    for mesh in meshes() {
        let found = ranks(mesh, |device| {
            let weight = Weight::new(&device);
            let y = weight.times(&numbers(&device, [2, 4], Split::Zigzag));
            let squares = y.clone().mul(y.clone());
            let loss = LossShare::mean(y).add(LossShare::mean(squares).scale(0.25));
            let [_, dw] = gradient(&weight, &loss, &device);
            [loss.value(), dw]
        });
        // mean t = 3.5, mean t^2 = 17.5; d/dw (w^2 m) = 2 m.
        assert_eq!(found, vec![[3.5 + 4.375, 3.5 + 8.75]; mesh.ranks()], "{mesh}");
    }
}

/// Case 9: 8 samples of 32 valid tokens in all, in 1, 2 or 4 micro-steps: the count is that of the whole batch.
#[test]
fn accumulated_steps_are_one_step() {
    let lengths = [1usize, 2, 3, 4, 5, 6, 7, 4];
    let expected: f64 = lengths
        .iter()
        .map(|length| (length * (length - 1) / 2) as f64)
        .sum::<f64>()
        / 32.0;
    for mesh in meshes() {
        for steps in [1, 2, 4] {
            let found = ranks(mesh, |device| {
                let weight = Weight::new(&device);
                let rows = 8 / steps;
                let micro: Vec<(SpTensor<2, Int>, SpTensor<2>)> = lengths
                    .chunks(rows)
                    .map(|lengths| {
                        let row = |length: &usize| {
                            (0..7)
                                .map(|t| if t < *length { t as i64 } else { IGNORED })
                                .collect::<Vec<_>>()
                        };
                        let all: Vec<i64> = lengths.iter().flat_map(row).collect();
                        let targets = labels(&device, &all, [rows, 7], Split::Zigzag);
                        let values = targets.clone().tokenwise(|labels| labels.clamp_min(0).float());
                        (targets, values)
                    })
                    .collect();
                let count = valid_tokens(micro.iter().map(|(targets, _)| targets));
                assert_eq!(count, 32);
                let mut sum = GradientsAccumulator::new();
                for (_, values) in &micro {
                    let loss = LossShare::new(weight.times(values), count);
                    sum.accumulate(&weight, GradientsParams::from_grads(loss.backward(), &weight));
                }
                let grads = sum_gradients(&weight, sum.grads(), &ParamLayouts::replicated(), device.mesh());
                f64s(&SgdConfig::new().init().step(1.0, weight, grads).w.val())[0]
            });
            assert_eq!(found, vec![1.0 - expected; mesh.ranks()], "{mesh}, {steps} micro-steps");
        }
    }
}

const CROSS_ENTROPY: &[u8] = include_bytes!("../fixtures/cross_entropy/cross_entropy.safetensors");
const FACTS: &str = include_str!("../fixtures/cross_entropy/cross_entropy.json");

/// PyTorch's numbers: `chunk_counts` 16, 0, 1, 3 make every mean of means wrong.
#[test]
fn cross_entropy_of_uneven_chunks_is_pytorchs() {
    let facts: serde_json::Value = serde_json::from_str(FACTS).expect("valid JSON");
    for case in ["uneven", "uneven_large", "shift"] {
        let facts = &facts["cases"][case];
        let number = |path: &str| {
            facts
                .pointer(path)
                .and_then(serde_json::Value::as_f64)
                .expect("a number")
        };
        let tolerance = number("/tolerances/mean/suggested_atol");
        let gradient_tolerance = number("/tolerances/dlogits/suggested_atol");
        let file = Fixture::new(CROSS_ENTROPY);
        let mean = file.f64s(&format!("{case}.mean_f64"))[0];
        let dlogits = file.f64s(&format!("{case}.dlogits_f64"));
        for mesh in [
            mesh(1, 1, 1),
            mesh(1, 1, 2),
            mesh(1, 2, 1),
            mesh(2, 1, 2),
            mesh(1, 1, 4),
            mesh(1, 2, 2),
        ] {
            for split in splits() {
                ranks(mesh, |device| {
                    let context = format!("{case} on {mesh}, {split}");
                    let layout = sequence([2, 32, 50], split.clone());
                    let logits = file.float::<3>(&format!("{case}.logits"), DType::F32, device.device());
                    let local = device.distribute(logits, &layout).into_local().detach().require_grad();
                    let targets = match case {
                        // From the labels as a tokenizer gives them.
                        "shift" => next_token_labels(file.int("shift.labels_unshifted", device.device())),
                        _ => file.int(&format!("{case}.labels"), device.device()),
                    };
                    let right = file.int::<2>(&format!("{case}.labels"), device.device());
                    assert_eq!(targets.to_data(), right.to_data(), "{context}");
                    let targets = device.distribute(targets, &sequence([2, 32], split.clone()));
                    let count = valid_tokens([&targets]);
                    assert_eq!(count as f64, number("/valid_tokens"), "{context}");
                    let hidden = SpTensor::from_local(local.clone(), layout, &device);
                    let positions = [0, 1].map(|dim| hidden.positions(dim));
                    let loss = token_loss(hidden, Tensor::eye(50, device.device()), &targets, None, count);
                    let value = loss.value();
                    assert!(
                        (value - mean).abs() <= tolerance,
                        "{context}: loss {value}, PyTorch in f64 {mean}"
                    );
                    for wrong in facts
                        .as_object()
                        .expect("an object")
                        .iter()
                        .filter(|(name, _)| name.starts_with("WRONG_mean"))
                    {
                        let wrong = wrong.1.as_f64().expect("a number");
                        assert!(
                            (value - wrong).abs() > 1e3 * tolerance,
                            "{context}: loss {value} is {wrong}"
                        );
                    }
                    let grads = loss.backward();
                    let found = f64s(&local.grad(&grads).expect("a gradient"));
                    let indices = positions[0].iter().flat_map(|b| {
                        positions[1]
                            .iter()
                            .flat_map(move |s| (0..50).map(move |v| (b * 32 + s) * 50 + v))
                            .collect::<Vec<_>>()
                    });
                    for (found, index) in found.iter().zip(indices) {
                        let expected = dlogits[index];
                        assert!(
                            (found - expected).abs() <= gradient_tolerance,
                            "{context}: dlogits[{index}] {found}, PyTorch in f64 {expected}"
                        );
                    }
                });
            }
        }
    }
}

#[test]
fn labels_of_short_sequences() {
    let device = Device::flex();
    let labels = |length: usize| {
        let ids = Tensor::<2, Int>::zeros([2, length], &device);
        next_token_labels(ids).to_data().iter::<i64>().collect::<Vec<_>>()
    };
    assert_eq!(labels(0), Vec::<i64>::new());
    assert_eq!(labels(1), [IGNORED, IGNORED]);
    assert_eq!(labels(2), [0, IGNORED, 0, IGNORED]);
}

/// Burn 0.22 computes the backward of a division by a number in f32.
#[test]
fn gradients_of_f64_losses_are_not_rounded() {
    ranks(MeshShape::ulysses(2), |device| {
        let whole = tensor(&[1.0, 2.0, 4.0], [3], DType::F64, device.device()).require_grad();
        let layout = Layout::replicated([3]).shard(0, Axis::Ulysses, Split::Contiguous);
        let terms = device.distribute(whole.clone(), &layout);
        let held = terms.local().dims()[0];
        let grads = LossShare::new(terms, 3).backward();
        let grad = f64s(&whole.grad(&grads).expect("a gradient"));
        assert_eq!(grad.iter().filter(|grad| **grad == 1.0 / 3.0).count(), held, "{grad:?}");
    });
}
