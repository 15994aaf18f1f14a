//! Whole texts: what recomputing everything for each token writes, and the same on every mesh.

use std::sync::Mutex;

use burn::tensor::DType;
use burn_sp::attention::{KvMove, Mask};
use burn_sp::layout::MeshShape;
use burn_sp::train::shard_parameters;
use burn_sp::{SpDevice, launch_module};
use burn_sp_models::transformer::{GenerateOptions, Generated, MemoryOptions, Sampling, Transformer, generate};

use super::tiny;
use crate::common::device;

/// What every rank got; all the same.
fn written(model: &Transformer, prompt: &[u32], options: &GenerateOptions, mesh: MeshShape) -> Generated {
    let mut all = tiny::ranks(mesh, model, |device, model| {
        let told = Mutex::new(Vec::new());
        let text = generate(&model, prompt, options, &device, |token| {
            told.lock().unwrap().push(token)
        });
        assert_eq!(text.tokens, told.into_inner().unwrap());
        text
    });
    for other in &all[1..] {
        assert_eq!(
            (&other.tokens, other.stopped),
            (&all[0].tokens, all[0].stopped),
            "{mesh}"
        );
    }
    all.swap_remove(0)
}

/// Without a cache: everything again for each token.
fn recomputed(model: &Transformer, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    tiny::one_rank(model, |device, model| {
        let mut tokens = prompt.to_vec();
        for _ in 0..options.max_tokens {
            let all = tiny::tensor(&tokens, 1, device.device());
            let logits = tiny::at_once(&model, &all, &options.mask, &device);
            let last = &logits[logits.len() - tiny::VOCABULARY..];
            tokens.push(options.sampling.choose(last, tokens.len()));
        }
        tokens.split_off(prompt.len())
    })
}

/// Greedy and drawn; few tokens and many, under a window too; the prompt at once and in chunks.
#[test]
fn a_text_is_that_of_recomputing_everything() {
    let drawn = Sampling {
        top_k: Some(20),
        top_p: 0.9,
        ..Sampling::with_seed(11)
    };
    for config in [tiny::llama(), tiny::gpt2()] {
        let model = tiny::model(&config, DType::F64);
        for (prompt, mask, sampling) in [
            (1, Mask::Causal, Sampling::greedy()),
            (2, Mask::Causal, drawn),
            (7, Mask::Causal, drawn),
            (13, Mask::Causal, Sampling::greedy()),
            (13, Mask::Window { size: 5, sink: 1 }, drawn),
        ] {
            let prompt = tiny::ids(1, prompt);
            let options = GenerateOptions {
                sampling,
                mask,
                ..GenerateOptions::new(12)
            };
            let expected = recomputed(&model, &prompt, &options);
            assert_eq!(expected.len(), 12);
            for mesh in tiny::meshes() {
                let what = format!("{options:?}, {} tokens on {mesh}", prompt.len());
                assert_eq!(written(&model, &prompt, &options, mesh).tokens, expected, "{what}");
                let (chunk, kv) = (Some(3), KvMove::Gather);
                let chunks = GenerateOptions {
                    chunk,
                    kv,
                    ..options.clone()
                };
                assert_eq!(
                    written(&model, &prompt, &chunks, mesh).tokens,
                    expected,
                    "in chunks: {what}"
                );
            }
        }
    }
}

/// Parameters that ranks share out, the table of positions among them, are gathered when they are used.
#[test]
fn ranks_may_share_out_parameters() {
    for (config, positions) in [(tiny::llama(), None), (tiny::gpt2(), Some(tiny::POSITIONS))] {
        let model = tiny::model(&config, DType::F64);
        let (prompt, options) = (tiny::ids(1, 7), GenerateOptions::new(6));
        let expected = written(&model, &prompt, &options, MeshShape::default()).tokens;
        for mesh in [MeshShape::ulysses(2), MeshShape::tp(2).with_ring(2)] {
            let shared = |device: SpDevice, model: Transformer| {
                let (model, layouts) = model.shard(&device);
                let (model, shards) = shard_parameters(model, &device, &layouts);
                assert_eq!(model.max_positions(&shards), positions);
                let memory = MemoryOptions {
                    shards,
                    mlp_tiles: 2,
                    ..MemoryOptions::default()
                };
                let options = GenerateOptions {
                    memory,
                    ..options.clone()
                };
                generate(&model, &prompt, &options, &device, |_| {}).tokens
            };
            let found = launch_module(&crate::common::config(mesh), &device(), model.clone(), shared);
            let found = found.unwrap_or_else(|error| panic!("{mesh}: {error}"));
            assert_eq!(found, vec![expected.clone(); mesh.ranks()], "{mesh}");
        }
    }
}

#[test]
fn a_stop_token_ends_the_text() {
    let model = tiny::model(&tiny::llama(), DType::F64);
    let (prompt, options) = (tiny::ids(1, 5), GenerateOptions::new(20));
    let whole = written(&model, &prompt, &options, MeshShape::default());
    assert!(!whole.stopped && whole.tokens.len() == 20);
    let stop = whole.tokens[7];
    let first = whole.tokens.iter().position(|token| *token == stop).unwrap();
    let ended = GenerateOptions {
        stop: vec![stop],
        ..options
    };
    for mesh in [MeshShape::default(), MeshShape::ulysses(4)] {
        let text = written(&model, &prompt, &ended, mesh);
        assert!(text.stopped);
        assert_eq!(text.tokens, whole.tokens[..first]);
    }
}

/// Up to its last position, and no text at all.
#[test]
fn as_many_tokens_as_there_is_room_for() {
    let model = tiny::model(&tiny::gpt2(), DType::F64);
    let prompt = tiny::ids(1, 40);
    let room = tiny::POSITIONS + 1 - 40;
    let full = written(&model, &prompt, &GenerateOptions::new(room), MeshShape::ulysses(2));
    assert_eq!(full.tokens.len(), room);
    let none = written(&model, &prompt, &GenerateOptions::new(0), MeshShape::ulysses(2));
    assert!(none.tokens.is_empty() && !none.stopped);
    // What the cache has then: half of 40 tokens, and room up to 64, 6 key/value heads of 4 elements, 2 layers.
    assert_eq!(none.cache_bytes, 64 * 2 * 6 * 4 * 2 * 8);
}
