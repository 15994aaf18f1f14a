//! Training on packed documents: cases 9 and 35 with a model, a token file, a sampler and dropout.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::Device;
use burn_sp::data::{PackedSequence, Sampler, TokenBatch, TokenFile, TokenSequences, TokenWriter};
use burn_sp::layout::MeshShape;
use burn_sp::nn::DropoutKey;
use burn_sp::train::{ParamLayouts, StateInfo, StateStore, sum_gradients, valid_tokens};
use burn_sp::{SpDevice, launch};
use burn_sp_models::transformer::{ForwardOptions, Transformer, TransformerConfig};
use burn_sp_tests::{Values, parameters_by_path};

use crate::common::{config, mesh};

const VOCABULARY: usize = 23;
const SEED: u64 = 4;

/// A file of a test's own, with 24 documents of 1 to 13 tokens.
fn tokens(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    let mut writer = TokenWriter::create(&path, VOCABULARY, "").unwrap();
    for document in 0..24u32 {
        let length = document * 5 % 13 + 1;
        let tokens: Vec<u32> = (0..length).map(|token| (document * 3 + token * token) % 23).collect();
        writer.write(&tokens).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
    path
}

fn model(device: &SpDevice, dropout: f64) -> Transformer {
    let config = TransformerConfig {
        kv_heads: 2,
        dropout,
        ..TransformerConfig::llama(VOCABULARY, 16, 2, 4, 24)
    };
    device.seeded(SEED, |device| config.init(device))
}

/// A rank that trains on the sequences of a file, eight a step, in micro-steps.
struct Run<'a> {
    device: SpDevice,
    sequences: &'a TokenSequences,
    micro_steps: u64,
}

impl Run<'_> {
    fn batch(&self, micro_step: u64) -> TokenBatch {
        let sampler = Sampler::new(self.sequences.count(), 8 / self.micro_steps as usize, SEED);
        let own = sampler.own(micro_step, self.device.mesh()).into_iter();
        let own: Vec<PackedSequence> = own.map(|sample| self.sequences.get(sample).unwrap()).collect();
        TokenBatch::packed(&own, &self.device)
    }

    /// The summed gradients of a step, and its loss.
    fn gradients(&self, model: &Transformer, layouts: &ParamLayouts, step: u64) -> (GradientsParams, f64) {
        let micro_steps = step * self.micro_steps..(step + 1) * self.micro_steps;
        let batches: Vec<TokenBatch> = micro_steps.clone().map(|micro_step| self.batch(micro_step)).collect();
        let count = valid_tokens(batches.iter().map(|batch| &batch.labels));
        let (mut sum, mut loss) = (GradientsAccumulator::new(), 0.0);
        for (step, batch) in micro_steps.zip(batches) {
            let options = ForwardOptions {
                mask: batch.mask,
                dropout: Some(DropoutKey {
                    seed: SEED,
                    step,
                    layer: 0,
                }),
                ..ForwardOptions::default()
            };
            let share = model.loss(batch.tokens, &batch.labels, count, &options);
            sum.accumulate(model, GradientsParams::from_grads(share.backward(), model));
            loss += share.value();
        }
        (sum_gradients(model, sum.grads(), layouts, self.device.mesh()), loss)
    }
}

#[track_caller]
fn close(one: &BTreeMap<String, Values>, other: &BTreeMap<String, Values>, tolerance: f64, what: &str) {
    assert!(one.keys().eq(other.keys()), "{what}");
    for (name, one) in one {
        let other = &other[name];
        let size = one.peak();
        for (one, other) in one.elements.iter().zip(&other.elements) {
            assert!(
                (one - other).abs() <= tolerance * size,
                "{what}: {name}: {one} and {other}"
            );
        }
    }
}

/// Case 9: eight sequences of unequal documents in 1, 2 and 4 micro-steps, on 1, 2 and 4 ranks: one step, the same parameters.
#[test]
fn packed_micro_steps_are_one_step_on_every_mesh() {
    let sequences = TokenSequences::new(TokenFile::open(tokens("steps")).unwrap(), 12).with_boundaries();
    assert_eq!(sequences.count(), 15);
    let after = |shape: MeshShape, micro_steps: u64| {
        let found = launch(&config(shape), &Device::flex().autodiff(), |device: SpDevice| {
            let (model, layouts) = model(&device, 0.0).shard(&device);
            let run = Run {
                device: device.clone(),
                sequences: &sequences,
                micro_steps,
            };
            let (gradients, loss) = run.gradients(&model, &layouts, 0);
            let moved = burn::optim::SgdConfig::new().init().step(0.5, model, gradients);
            (parameters_by_path(&moved), loss)
        });
        found.unwrap_or_else(|error| panic!("{shape}: {error}")).swap_remove(0)
    };
    let (whole, loss) = after(mesh(1, 1, 1), 1);
    for shape in [
        mesh(1, 1, 1),
        mesh(2, 1, 1),
        mesh(1, 1, 2),
        mesh(1, 2, 1),
        mesh(2, 2, 1),
        mesh(2, 1, 2),
        mesh(1, 4, 1),
        mesh(1, 1, 4),
        mesh(1, 2, 2),
    ] {
        for micro_steps in [1, 2, 4] {
            let (parameters, other) = after(shape, micro_steps);
            let what = format!("{shape}, {micro_steps} micro-steps");
            assert!((loss - other).abs() <= 1e-5 * loss, "{what}: {loss} and {other}");
            close(&whole, &parameters, 1e-5, &what);
        }
    }
}

/// Case 35: saved on 4 ranks after step 3, continued on 1 and 2; packed tokens in order, and dropout. An epoch ends within the second step.
#[test]
fn packed_training_goes_on_on_other_ranks() {
    let sequences = TokenSequences::new(TokenFile::open(tokens("resumed")).unwrap(), 12).with_boundaries();
    let states = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data").join("states");
    let _ = fs::remove_dir_all(&states);
    let run = |shape: MeshShape, from: u64, to: u64| {
        let found = launch(&config(shape), &Device::flex().autodiff(), |device: SpDevice| {
            let (mut model, layouts) = model(&device, 0.2).shard(&device);
            let mut adamw = AdamWConfig::new().init();
            let store = StateStore::new(&states, &device).with_layouts(&layouts);
            if from > 0 {
                let info;
                (model, adamw, info) = store.load(model, adamw).unwrap();
                assert_eq!(info.step, from);
            }
            let run = Run {
                device: device.clone(),
                sequences: &sequences,
                micro_steps: 2,
            };
            let mut losses = Vec::new();
            for step in from..to {
                let (gradients, loss) = run.gradients(&model, &layouts, step);
                model = adamw.step(0.01, model, gradients);
                losses.push(loss);
            }
            if to == 3 {
                let info = StateInfo {
                    step: 3,
                    seed: SEED,
                    config: serde_json::Value::Null,
                };
                store.save(&info, &model, &adamw).unwrap();
            }
            losses
        });
        found.unwrap_or_else(|error| panic!("{shape}: {error}")).swap_remove(0)
    };
    let unbroken = run(mesh(1, 1, 1), 0, 6);
    let four = run(mesh(2, 2, 1), 0, 3);
    let near = |one: &[f64], other: &[f64], what: MeshShape| {
        assert_eq!(one.len(), other.len());
        for (one, other) in one.iter().zip(other) {
            assert!((one - other).abs() <= 1e-5 * one, "{what}: {one} and {other}");
        }
    };
    near(&unbroken[..3], &four, mesh(2, 2, 1));
    for shape in [
        mesh(1, 1, 1),
        mesh(2, 1, 1),
        mesh(1, 2, 1),
        mesh(1, 1, 2),
        MeshShape::tp(2),
    ] {
        near(&unbroken[3..], &run(shape, 3, 6), shape);
    }
}
