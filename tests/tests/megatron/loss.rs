use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::nn::Features;
use burn_sp::train::{LossShare, class_parallel_loss, token_loss, valid_tokens};
use burn_sp::{SpDevice, SpTensor};

use crate::common::{f64s, noise, ranks, tensor};

struct Problem {
    batch: usize,
    tokens: usize,
    features: usize,
    classes: usize,
    hidden: Vec<f64>,
    weight: Vec<f64>,
    labels: Vec<i64>,
    token_weights: Vec<f64>,
}

/// What a rank ends with: the loss, and its parts of the gradients, with their global positions.
struct Found {
    loss: f64,
    hidden: Vec<f64>,
    weight: Vec<f64>,
}

impl Problem {
    /// Whole gradients of the loss on this rank's mesh.
    fn run(&self, device: &SpDevice, parallel: bool) -> Found {
        let Problem {
            batch,
            tokens,
            features,
            classes,
            ..
        } = *self;
        let place = device.device();
        let hidden = tensor(&self.hidden, [batch, tokens, features], DType::F64, place).require_grad();
        let weight = tensor(&self.weight, [features, classes], DType::F64, place).require_grad();
        let labels = Tensor::<2, Int>::from_data(TensorData::new(self.labels.clone(), [batch, tokens]), place);
        let token_weights = tensor(&self.token_weights, [batch, tokens], DType::F64, place);
        let layout = |shape: Vec<usize>| device.sequence_layout(shape).shard(1, Axis::Tp, Split::Contiguous);
        let labels = device.distribute(labels, &layout(vec![batch, tokens]));
        let token_weights = device.distribute(token_weights, &layout(vec![batch, tokens]));
        let count = valid_tokens([&labels]);
        let x = device.distribute(hidden.clone(), &layout(vec![batch, tokens, features]));
        let split = Features::sharded(classes, 1);
        let loss = if parallel {
            let own = split.on(Layout::replicated([features, classes]), 1, device.mesh());
            let own = device.distribute(weight.clone(), &own).into_local();
            class_parallel_loss(x, own, split, &labels, Some(&token_weights), count)
        } else {
            token_loss(x, weight.clone(), &labels, Some(&token_weights), count)
        };
        let (value, grads) = (loss.value(), loss.backward());
        // Leaves that every rank holds whole: the gradients are terms.
        let sum = |term: Tensor<1>| {
            let layout = Axis::ALL
                .into_iter()
                .fold(Layout::replicated(term.dims()), Layout::partial);
            f64s(&SpTensor::from_local(term, layout, device).gather().into_local())
        };
        Found {
            loss: value,
            hidden: sum(hidden.grad(&grads).expect("a gradient").flatten(0, 2)),
            weight: sum(weight.grad(&grads).expect("a gradient").flatten(0, 1)),
        }
    }

    fn check(&self, mesh: MeshShape) {
        let single = ranks(MeshShape::default(), |device| self.run(&device, false)).remove(0);
        let all = ranks(mesh, |device| self.run(&device, true));
        for (rank, found) in all.iter().enumerate() {
            let near = |found: &[f64], expected: &[f64], what: &str| {
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        (found - expected).abs() < 1e-13,
                        "{mesh}, rank {rank}, {what}: {found}, expected {expected}"
                    );
                }
            };
            assert_eq!(found.loss.to_bits(), all[0].loss.to_bits());
            near(&[found.loss], &[single.loss], "loss");
            near(&found.hidden, &single.hidden, "gradient of hidden");
            near(&found.weight, &single.weight, "gradient of the weight");
        }
    }
}

fn problem(batch: usize, tokens: usize, classes: usize) -> Problem {
    let features = 6;
    let labels = noise(3, batch * tokens);
    let class = |x: &f64| match *x {
        x if x < -0.8 => -100,
        x => ((x + 1.0) * 1e5) as i64 % classes as i64,
    };
    Problem {
        batch,
        tokens,
        features,
        classes,
        hidden: noise(1, batch * tokens * features).iter().map(|x| 3.0 * x).collect(),
        weight: noise(2, features * classes),
        labels: labels.iter().map(class).collect(),
        token_weights: (0..batch * tokens).map(|i| 1.0 + i as f64 % 7.0).collect(),
    }
}

fn meshes() -> Vec<MeshShape> {
    let tp = MeshShape::tp;
    vec![
        tp(1),
        tp(2),
        tp(3),
        tp(4),
        MeshShape { ulysses: 2, ..tp(2) },
        MeshShape { ring: 2, ..tp(2) },
        tp(2).with_dp(2),
    ]
}

/// Uneven classes, uneven tokens, fewer classes or tokens than ranks, ignored labels, weighted tokens.
#[test]
fn classes_on_several_ranks_are_the_classes_on_one() {
    for (batch, tokens, classes) in [(2, 7, 11), (1, 3, 5), (2, 1, 3), (1, 5, 2)] {
        for mesh in meshes() {
            problem(batch, tokens, classes).check(mesh);
        }
    }
}

/// Several chunks, of which the ranks with fewer tokens have less.
#[test]
fn chunks_of_many_tokens() {
    for mesh in [MeshShape::tp(2), MeshShape::tp(3)] {
        problem(2, 1501, 7).check(mesh);
    }
}

/// O4, exactly: with zero logits every token's loss is ln V and the gradient of the logits is (1/V - onehot) / N. The
/// identity as hidden states shows it in the weight's gradient.
#[test]
fn zero_logits() {
    let (tokens, classes) = (7, 5);
    let mut identity = vec![0.0; tokens * tokens];
    (0..tokens).for_each(|token| identity[token * tokens + token] = 1.0);
    let labels = vec![4, 0, -1, 2, 1, 3, -1];
    let problem = Problem {
        batch: 1,
        tokens,
        features: tokens,
        classes,
        hidden: identity,
        weight: vec![0.0; tokens * classes],
        labels: labels.clone(),
        token_weights: vec![1.0; tokens],
    };
    for mesh in meshes().into_iter().filter(|mesh| mesh.dp == 1) {
        for found in ranks(mesh, |device| problem.run(&device, true)) {
            assert!(
                (found.loss - (classes as f64).ln()).abs() < 1e-15,
                "{mesh}: {}",
                found.loss
            );
            for (token, label) in labels.iter().enumerate() {
                for class in 0..classes {
                    let expected = match *label {
                        label if label < 0 => 0.0,
                        label => (0.2 - f64::from(u8::from(label == class as i64))) / 5.0,
                    };
                    let found = found.weight[token * classes + class];
                    assert!(
                        (found - expected).abs() < 1e-16,
                        "{mesh}, token {token}, class {class}: {found}"
                    );
                }
            }
            assert!(found.hidden.iter().all(|x| *x == 0.0), "{mesh}");
        }
    }
}

/// A scaled loss, and one with another added: the gradient that comes in is the same on every rank of tp.
#[test]
fn losses_scaled_and_added() {
    let run = |mesh: MeshShape| {
        ranks(mesh, |device| {
            let problem = problem(1, 5, 7);
            let place = device.device();
            let hidden = tensor(&problem.hidden, [1, 5, 6], DType::F64, place).require_grad();
            let x = SpTensor::replicated(hidden.clone(), &device).redistribute(Axis::Tp, Placement::Shard(1));
            let labels = Tensor::<2, Int>::from_data(TensorData::new(problem.labels, [1, 5]), place);
            let labels = SpTensor::replicated(labels, &device).redistribute(Axis::Tp, Placement::Shard(1));
            let split = Features::sharded(7, 1);
            let own = split.on(Layout::replicated([6, 7]), 1, device.mesh());
            let weight = tensor(&problem.weight, [6, 7], DType::F64, place);
            let own = device.distribute(weight, &own).into_local();
            let auxiliary = LossShare::mean(x.clone().mul(x.clone()));
            let loss = class_parallel_loss(x, own, split, &labels, None, 5);
            let grads = loss.scale(3.0).add(auxiliary.scale(0.5)).backward();
            let term = hidden.grad(&grads).expect("a gradient");
            let layout = Axis::ALL
                .into_iter()
                .fold(Layout::replicated([1, 5, 6]), Layout::partial);
            f64s(&SpTensor::from_local(term, layout, &device).gather().into_local())
        })
        .remove(0)
    };
    let single = run(MeshShape::default());
    for mesh in [MeshShape::tp(2), MeshShape::tp(3)] {
        for (found, expected) in run(mesh).iter().zip(&single) {
            assert!((found - expected).abs() < 1e-14, "{mesh}: {found}, expected {expected}");
        }
    }
}
