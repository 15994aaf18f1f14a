//! Optimizer state shared out over ranks: the same training, a share of the state.

mod common;

use std::collections::BTreeMap;

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sp::layout::MeshShape;
use burn_sp::train::{ShardedOptimizer, clip_by_global_norm, sum_gradients, valid_tokens};
use burn_sp::{SpDevice, launch_module, seeded};
use burn_sp_models::transformer::{ForwardOptions, Transformer, TransformerConfig, tokens_and_labels};
use burn_sp_tests::{Values, parameters_by_path};
use common::{config, mesh};

const STEPS: usize = 3;

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

/// By rank: parameters, norms, bytes of state.
type Outcome = (BTreeMap<String, Values>, Vec<f64>, usize);

/// Sums, clips and updates as a training program does, one way or the other.
fn train(shape: MeshShape, hidden: usize, clip: Option<f64>, sharded: bool) -> Vec<Outcome> {
    let device = Device::flex().autodiff();
    // No length is a multiple of the ranks, and there are biases of 3.
    let model = TransformerConfig {
        heads: 3,
        kv_heads: 3,
        ..TransformerConfig::gpt2(17, hidden, 1, 3, 11)
    };
    let model = seeded(&device, 5, |device| model.init(device));
    launch_module(
        &config(shape),
        &device,
        model,
        |device: SpDevice, model: Transformer| {
            let (mut model, layouts) = model.shard(&device);
            let mesh = device.mesh();
            let (mut whole, mut shared) = (adamw(), ShardedOptimizer::new(adamw()));
            let mut norms = Vec::new();
            for step in 0..STEPS as i64 {
                let ids: Vec<i64> = (0..4 * 12).map(|i| (i * i * 7 + 3 * i + step) % 17).collect();
                let windows = Tensor::<2, Int>::from_data(TensorData::new(ids, [4, 12]), device.device());
                let (tokens, labels) = tokens_and_labels(windows, &device);
                let loss = model.loss(tokens, &labels, valid_tokens([&labels]), &ForwardOptions::default());
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let norm;
                (model, norm) = if sharded {
                    shared.step(0.01, model, grads, clip, &layouts, mesh)
                } else {
                    let grads = sum_gradients(&model, grads, &layouts, mesh);
                    let (grads, norm) = clip_by_global_norm(&model, grads, clip, &layouts, mesh);
                    (whole.step(0.01, model, grads), norm)
                };
                norms.push(norm);
            }
            let state = if sharded { shared.into_inner() } else { whole };
            let bytes = state.into_bytes().expect("the state can be written").len();
            (parameters_by_path(&model), norms, bytes)
        },
    )
    .unwrap_or_else(|error| panic!("{shape}: {error}"))
}

#[test]
fn training_is_the_same() {
    for shape in [
        MeshShape::default(),
        mesh(2, 1, 1),
        mesh(1, 3, 1),
        mesh(2, 1, 2),
        MeshShape::tp(2),
        MeshShape::tp(2).with_ulysses(2),
    ] {
        // Without clipping the sums are the same, to the bit; the norm adds squares in another order.
        let (whole, shared) = (train(shape, 15, None, false), train(shape, 15, None, true));
        for (rank, (a, b)) in whole.iter().zip(&shared).enumerate() {
            assert_eq!(a.0, b.0, "{shape}, rank {rank}");
            for (a, b) in a.1.iter().zip(&b.1) {
                assert!((a - b).abs() <= 1e-12 * a, "{shape}, rank {rank}: norms {a} and {b}");
            }
        }
        let (whole, shared) = (train(shape, 15, Some(0.1), false), train(shape, 15, Some(0.1), true));
        for (a, b) in whole.iter().zip(&shared) {
            assert!(a.1[0] > 0.1, "the gradients are clipped: {:?}", a.1);
            for ((name, a), (_, b)) in a.0.iter().zip(&b.0) {
                let worst = a
                    .elements
                    .iter()
                    .zip(&b.elements)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f64::max);
                assert!(worst < 1e-7, "{shape}: {name} is off by {worst}");
            }
        }
    }
}

#[test]
fn a_rank_keeps_its_share_of_the_state() {
    let whole = train(MeshShape::default(), 96, None, false)[0].2;
    for shape in [mesh(4, 1, 1), mesh(1, 4, 1), mesh(1, 1, 4), mesh(2, 1, 2)] {
        for (rank, (_, _, bytes)) in train(shape, 96, None, true).into_iter().enumerate() {
            // Beside the elements, names and shapes are written.
            assert!(
                bytes as f64 <= 0.27 * whole as f64,
                "{shape}, rank {rank}: {bytes} of {whole} bytes"
            );
        }
    }
}
