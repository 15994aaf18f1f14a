//! Optimizer state and parameters shared out over ranks: the same training, a share of the memory.

mod common;

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sp::layout::MeshShape;
use burn_sp::train::{
    ParamShards, ShardedOptimizer, clip_by_global_norm, shard_parameters, sum_gradients, valid_tokens,
};
use burn_sp::{SpDevice, launch_module, seeded};
use burn_sp_models::transformer::{
    ForwardOptions, MemoryOptions, Recompute, Transformer, TransformerConfig, tokens_and_labels,
};
use burn_sp_tests::{Values, parameters_by_path};
use common::{config, mesh};

const STEPS: usize = 3;

fn meshes() -> [MeshShape; 6] {
    [
        MeshShape::default(),
        mesh(2, 1, 1),
        mesh(1, 3, 1),
        mesh(2, 1, 2),
        MeshShape::tp(2),
        MeshShape::tp(2).with_ulysses(2),
    ]
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

/// What ranks share out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shared {
    Nothing,
    State,
    /// Parameters as well, and this is computed again in backward.
    Parameters(Recompute),
}

/// What a rank ends with.
struct Outcome {
    /// Whole, by name.
    parameters: BTreeMap<String, Values>,
    norms: Vec<f64>,
    /// Parameters that it held while it trained.
    held: usize,
    /// Bytes of the optimizer's state.
    state: usize,
}

/// Biases of 3 and heads of odd sizes; tied output.
fn gpt2(hidden: usize) -> TransformerConfig {
    TransformerConfig {
        heads: 3,
        kv_heads: 3,
        ..TransformerConfig::gpt2(17, hidden, 2, 3, 11)
    }
}

/// No parameter is read twice.
fn llama() -> TransformerConfig {
    TransformerConfig::llama(17, 18, 2, 3, 11)
}

fn train(model: &TransformerConfig, shape: MeshShape, clip: Option<f64>, shared: Shared) -> Vec<Outcome> {
    train_tiled(model, shape, clip, 1, shared)
}

/// Sums, clips and updates as a training program does, in one way or another.
fn train_tiled(
    model: &TransformerConfig,
    shape: MeshShape,
    clip: Option<f64>,
    mlp_tiles: usize,
    shared: Shared,
) -> Vec<Outcome> {
    let device = Device::flex().autodiff();
    let model = seeded(&device, 5, |device| model.init(device));
    launch_module(
        &config(shape),
        &device,
        model,
        |device: SpDevice, model: Transformer| {
            let (model, mut layouts) = model.shard(&device);
            let mut memory = MemoryOptions {
                mlp_tiles,
                ..MemoryOptions::default()
            };
            let mut model = match shared {
                Shared::Parameters(recompute) => {
                    let (model, shards) = shard_parameters(model, &device, &layouts);
                    layouts = shards.layouts().clone();
                    (memory.recompute, memory.shards) = (recompute, shards);
                    model
                }
                _ => model,
            };
            let options = ForwardOptions {
                memory,
                ..ForwardOptions::default()
            };
            let mesh = device.mesh();
            let (mut whole, mut sharded) = (adamw(), ShardedOptimizer::new(adamw()));
            let mut norms = Vec::new();
            for step in 0..STEPS as i64 {
                let ids: Vec<i64> = (0..4 * 12).map(|i| (i * i * 7 + 3 * i + step) % 17).collect();
                let windows = Tensor::<2, Int>::from_data(TensorData::new(ids, [4, 12]), device.device());
                let (tokens, labels) = tokens_and_labels(windows, &device);
                let loss = model.loss(tokens, &labels, valid_tokens([&labels]), &options);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let norm;
                (model, norm) = if shared == Shared::State {
                    sharded.step(0.01, model, grads, clip, &layouts, mesh)
                } else {
                    let grads = sum_gradients(&model, grads, &layouts, mesh);
                    let (grads, norm) = clip_by_global_norm(&model, grads, clip, &layouts, mesh);
                    (whole.step(0.01, model, grads), norm)
                };
                norms.push(norm);
            }
            let state = match shared {
                Shared::State => sharded.into_inner(),
                _ => whole,
            };
            Outcome {
                held: model.num_params(),
                parameters: parameters_by_path(&options.memory.shards.gather(&model)),
                norms,
                state: state.into_bytes().expect("the state can be written").len(),
            }
        },
    )
    .unwrap_or_else(|error| panic!("{shape}: {error}"))
}

/// The same parameters, to the bit or within `tolerance`, and the same norms but for the order in which squares are added.
fn same(context: &str, a: &[Outcome], b: &[Outcome], tolerance: f64) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        for (name, values) in &a.parameters {
            let others = &b.parameters[name];
            assert_eq!(values.shape, others.shape, "{context}, rank {rank}: {name}");
            let pairs = values.elements.iter().zip(&others.elements);
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst <= tolerance, "{context}, rank {rank}: {name} is off by {worst}");
        }
        for (a, b) in a.norms.iter().zip(&b.norms) {
            assert!(
                (a - b).abs() <= tolerance.max(1e-12) * a.max(1.0),
                "{context}, rank {rank}: norms {a} and {b}"
            );
        }
    }
}

#[test]
fn shared_state_trains_the_same() {
    for shape in meshes() {
        let run = |clip, shared| train(&gpt2(15), shape, clip, shared);
        let context = shape.to_string();
        // Without clipping the sums are the same, to the bit; the norm adds squares in another order.
        same(&context, &run(None, Shared::Nothing), &run(None, Shared::State), 0.0);
        let whole = run(Some(0.1), Shared::Nothing);
        assert!(
            whole[0].norms[0] > 0.1,
            "the gradients are clipped: {:?}",
            whole[0].norms
        );
        same(&context, &whole, &run(Some(0.1), Shared::State), 1e-7);
    }
}

#[test]
fn shared_parameters_train_the_same() {
    for shape in meshes() {
        // The MLP's parameters are gathered in the block, and so computed where its tiles run.
        for (recompute, tiles) in [
            (Recompute::Blocks, 1),
            (Recompute::Blocks, 2),
            (Recompute::None, 3),
            (Recompute::Attention, 1),
            (Recompute::AllButAttention, 2),
        ] {
            let context = format!("{shape}, {recompute:?}, {tiles} tiles");
            let run = |config: &TransformerConfig, clip, shared| train_tiled(config, shape, clip, tiles, shared);
            let shared = Shared::Parameters(recompute);
            let whole = run(&llama(), None, Shared::Nothing);
            same(&context, &whole, &run(&llama(), None, shared), 0.0);
            if recompute != Recompute::Blocks {
                continue;
            }
            // A tied embedding's two gradients are summed over the ranks one by one, so they round otherwise.
            let whole = run(&gpt2(15), Some(0.1), Shared::Nothing);
            same(&context, &whole, &run(&gpt2(15), Some(0.1), shared), 1e-5);
        }
    }
}

#[test]
fn a_rank_keeps_its_share() {
    let whole = &train(&gpt2(96), MeshShape::default(), None, Shared::Nothing)[0];
    for shape in [mesh(4, 1, 1), mesh(1, 4, 1), mesh(1, 1, 4), mesh(2, 1, 2)] {
        for shared in [Shared::State, Shared::Parameters(Recompute::Blocks)] {
            for (rank, own) in train(&gpt2(96), shape, None, shared).into_iter().enumerate() {
                let share = |part: usize, whole: usize| part as f64 / whole as f64;
                let context = format!("{shape}, {shared:?}, rank {rank}");
                // Beside the elements, names and shapes are written.
                assert!(
                    share(own.state, whole.state) <= 0.27,
                    "{context}: {} bytes of state",
                    own.state
                );
                let most = if shared == Shared::State { 1.0 } else { 0.27 };
                assert!(
                    share(own.held, whole.held) <= most,
                    "{context}: {} parameters",
                    own.held
                );
            }
        }
    }
}

/// Nothing is cut that is smaller than the ranks are many, and nothing at all on one rank.
#[test]
fn what_stays_whole() {
    let parts = |shape| train(&llama(), shape, None, Shared::Parameters(Recompute::Blocks))[0].held;
    let whole = parts(MeshShape::default());
    assert_eq!(
        whole,
        train(&llama(), MeshShape::default(), None, Shared::Nothing)[0].held
    );
    assert_eq!(
        ParamShards::default()
            .layouts()
            .sharded_axes(burn::module::ParamId::new()),
        []
    );
    let even = whole.div_ceil(2);
    assert!((even..even + 20).contains(&parts(mesh(2, 1, 1))));
}
