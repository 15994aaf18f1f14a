//! Whole models on every mesh of up to 8 ranks, under every mask, on both ring splits: output, loss and every parameter's
//! gradient against one rank, in f64. Generated, none picked by hand.

mod common;
mod everywhere;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_sp::attention::{KvMove, Mask};
use burn_sp::layout::{MeshShape, Split};
use burn_sp::nn::DropoutKey;
use burn_sp::seeded;
use burn_sp::train::valid_tokens;
use burn_sp_models::transformer::{
    ForwardOptions, MemoryOptions, Recompute, Transformer, TransformerConfig, next_token_labels,
};
use burn_sp_tests::{Comparison, Outcome, cast};
use common::TIMEOUT;
use everywhere::{masks, meshes};

const VOCABULARY: usize = 19;

/// Nothing divides by 2, 4 or 8 but the batch, of which every data-parallel rank needs a sample.
const BATCH: usize = 8;
const TOKENS: usize = 13;

/// In f64, where sums in another order differ by a few roundings of the largest element, and any fault by more.
const ROUNDINGS: f64 = 32.0;

/// Tied and untied output, biases or none, SwiGLU or GELU; as many key/value heads as query heads, fewer, one.
fn models() -> Vec<TransformerConfig> {
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
    vec![
        of(TransformerConfig::llama(VOCABULARY, 12, 1, 3, 11), 3, 3),
        of(TransformerConfig::llama(VOCABULARY, 12, 1, 6, 11), 6, 3),
        of(TransformerConfig::gpt2(VOCABULARY, 12, 1, 5, TOKENS), 5, 1),
    ]
}

fn ids(device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..BATCH * TOKENS)
        .map(|i| (i * i * 7 + 3 * i) as i64 % VOCABULARY as i64)
        .collect();
    Tensor::from_data(TensorData::new(ids, [BATCH, TOKENS]), device)
}

fn agrees(
    config: &TransformerConfig,
    mask: &Mask,
    split: &Split,
    kv: KvMove,
    (recompute, mlp_tiles): (Recompute, usize),
    meshes: Vec<MeshShape>,
) {
    let model = seeded(&Device::flex(), 5, |device| config.init(device));
    let (mask, split) = (mask.clone(), split.clone());
    let context = format!("{config:?}, {mask:?}, {split}, {kv:?}, {recompute:?}, {mlp_tiles} tiles");
    let comparison = Comparison::new(cast(model, DType::F64))
        .with_factor(ROUNDINGS)
        .shard_by(Transformer::shard)
        .with_timeout(TIMEOUT)
        .on(meshes);
    let outcome = comparison.run(move |rank, model| {
        let device = rank.device().clone().with_ring_split(split.clone());
        let whole = ids(device.device());
        let labels = device.distribute_tokens(next_token_labels(whole.clone()));
        let tokens = device.distribute_tokens(whole);
        let options = ForwardOptions {
            kv,
            mask: mask.clone(),
            dropout: Some(DropoutKey {
                seed: 11,
                step: 3,
                layer: 0,
            }),
            memory: MemoryOptions {
                recompute,
                mlp_tiles,
                ..MemoryOptions::default()
            },
        };
        let hidden = model.forward(tokens.clone(), &options);
        let loss = model.loss(tokens, &labels, valid_tokens([&labels]), &options);
        Outcome::new(loss).output("hidden", &hidden)
    });
    if let Err(difference) = outcome {
        panic!("{context}: {difference}");
    }
}

/// What is computed again, and the tiles of the MLP: more of them than a rank has tokens are allowed.
const MEMORY: [(Recompute, usize); 5] = [
    (Recompute::None, 1),
    (Recompute::Blocks, 1),
    (Recompute::Attention, 3),
    (Recompute::AllButAttention, 5),
    (Recompute::Blocks, 2),
];

fn agree_where(of: impl Fn(&MeshShape) -> bool) {
    let mut next = 0;
    for config in models() {
        for mask in masks(TOKENS) {
            for split in [Split::Contiguous, Split::Zigzag] {
                for kv in [KvMove::Ring, KvMove::Gather] {
                    let chosen = meshes().into_iter().filter(|(mesh, moved)| *moved == kv && of(mesh));
                    // Without a ring, one split is as good as the other.
                    let chosen = chosen.filter(|(mesh, _)| mesh.ring > 1 || split == Split::Zigzag);
                    let chosen: Vec<_> = chosen.map(|(mesh, _)| mesh).collect();
                    // Each mask and mesh meets each way to save memory, on some split or with some way to move keys.
                    agrees(&config, &mask, &split, kv, MEMORY[next % MEMORY.len()], chosen);
                    next += 1;
                }
            }
            next += 1;
        }
    }
}

#[test]
fn every_model_agrees_without_tp() {
    agree_where(|mesh| mesh.tp == 1);
}

#[test]
fn every_model_agrees_with_tp() {
    agree_where(|mesh| mesh.tp > 1);
}
