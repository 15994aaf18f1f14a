//! Attention and whole models on a GPU through wgpu (in CI, Mesa's software Vulkan), ranks sharing the device.
//!
//! Layout changes on it: `BURN_SP_DEVICE=wgpu cargo test --workspace --features wgpu --test transitions`.

mod attention {
    pub mod problem;
}
mod common;
mod everywhere;

use attention::problem::{Problem, rounded, run, truth, within};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_sp::attention::{KvMove, Mask};
use burn_sp::layout::{MeshShape, Split};
use burn_sp::nn::DropoutKey;
use burn_sp::seeded;
use burn_sp::train::{Keep, valid_tokens};
use burn_sp_models::transformer::{
    ForwardOptions, MemoryOptions, Recompute, Transformer, TransformerConfig, next_token_labels,
};
use burn_sp_tests::{Comparison, Outcome};
use common::{TIMEOUT, mesh};

fn gpu() -> Device {
    Device::wgpu(Default::default())
}

/// Every strategy, and strategies in one another.
fn meshes() -> Vec<(MeshShape, KvMove)> {
    let tp = |mesh: MeshShape, tp: usize| MeshShape { tp, ..mesh };
    vec![
        (mesh(1, 2, 1), KvMove::Ring),
        (mesh(1, 3, 1), KvMove::Gather),
        (mesh(1, 1, 3), KvMove::Ring),
        (mesh(2, 2, 2), KvMove::Ring),
        (tp(mesh(1, 2, 1), 2), KvMove::Gather),
        (tp(mesh(1, 1, 2), 2), KvMove::Ring),
    ]
}

#[test]
fn attention_is_as_exact_on_many_ranks_as_on_one() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !gpu().supports_dtype(dtype) {
            eprintln!("skipped: no {dtype:?} on this device");
            continue;
        }
        for (number, mask) in everywhere::masks(13).into_iter().enumerate() {
            for dropout in [0.0, 0.3] {
                let problem = Problem {
                    dropout,
                    ..Problem::new(13, 6, 3, mask.clone())
                }
                .in_dtype(dtype);
                let values = rounded(&problem);
                let truth = truth(&problem, &values);
                let on_gpu =
                    |problem: &Problem, mesh, split: &Split| run(problem, &values, mesh, split, &gpu().autodiff());
                let one = on_gpu(&problem, MeshShape::default(), &Split::Contiguous);
                // Each mesh with some masks and each mask on some meshes: the software device is slow.
                for (mesh, kv) in meshes().into_iter().skip(number % 3).step_by(3) {
                    let found = on_gpu(&problem.clone().moving(kv), mesh, &Split::Zigzag);
                    within(&found, &one, &truth, dtype, &format!("{problem:?} on {mesh}"));
                }
            }
        }
    }
}

/// Loss, residual stream and every parameter's gradient, with dropout.
#[test]
fn models_agree_with_one_rank() {
    const VOCABULARY: usize = 19;
    const TOKENS: usize = 13;
    let of = |config: TransformerConfig, heads: usize, kv_heads: usize| TransformerConfig {
        heads,
        kv_heads,
        head_dim: 4,
        ffn_size: 11,
        dropout: 0.2,
        attention_dropout: 0.2,
        init_std: 0.3,
        ..config
    };
    for config in [
        of(TransformerConfig::llama(VOCABULARY, 12, 2, 6, 11), 6, 3),
        of(TransformerConfig::gpt2(VOCABULARY, 12, 2, 3, TOKENS), 3, 3),
    ] {
        for (mesh, kv) in meshes().into_iter().skip(usize::from(config.bias)).step_by(2) {
            let model = seeded(&Device::flex(), 5, |device| config.init(device));
            let comparison = Comparison::new(model)
                .on_device(gpu().autodiff())
                .shard_by(Transformer::shard)
                .with_timeout(TIMEOUT)
                .on([mesh]);
            let outcome = comparison.run(|rank, model| {
                let device = rank.device();
                let ids: Vec<i64> = (0..4 * TOKENS as i64)
                    .map(|i| (i * i * 7 + 3 * i) % VOCABULARY as i64)
                    .collect();
                let whole = Tensor::<2, Int>::from_data(TensorData::new(ids, [4, TOKENS]), device.device());
                let labels = device.distribute_tokens(next_token_labels(whole.clone()));
                let tokens = device.distribute_tokens(whole);
                let options = ForwardOptions {
                    kv,
                    mask: Mask::Causal,
                    dropout: Some(DropoutKey {
                        seed: 11,
                        step: 3,
                        layer: 0,
                    }),
                    memory: MemoryOptions {
                        recompute: Recompute::Blocks,
                        keep: Keep::Host,
                        mlp_tiles: 2,
                        ..MemoryOptions::default()
                    },
                };
                let hidden = model.forward(tokens.clone(), &options);
                let loss = model.loss(tokens, &labels, valid_tokens([&labels]), &options);
                Outcome::new(loss).output("hidden", &hidden)
            });
            if let Err(difference) = outcome {
                panic!("{config:?} on {mesh}: {difference}");
            }
        }
    }
}
