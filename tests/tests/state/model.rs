//! Training a tiny transformer for some steps, from a state or from the start, as a program does.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sp::layout::MeshShape;
use burn_sp::train::{
    ParamShards, ShardedOptimizer, StateInfo, StateStore, clip_by_global_norm, shard_parameters, sum_gradients,
    valid_tokens,
};
use burn_sp::{SpDevice, launch_module, seeded};
use burn_sp_models::transformer::{
    ForwardOptions, MemoryOptions, Recompute, Transformer, TransformerConfig, tokens_and_labels,
};
use burn_sp_tests::{Fixture, Values, gradients_by_path};

use crate::common::config;

/// What ranks share out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shared {
    Nothing,
    Moments,
    Parameters,
}

pub const SHARED: [Shared; 3] = [Shared::Nothing, Shared::Moments, Shared::Parameters];

/// Some steps of a model.
#[derive(Clone, Debug)]
pub struct Run {
    pub model: TransformerConfig,
    pub mesh: MeshShape,
    pub shared: Shared,
    pub clip: Option<f64>,
    /// Where the state before the first of them is.
    pub from: Option<PathBuf>,
    /// Counted from 0 over all runs.
    pub steps: Range<u64>,
    /// Where the state after the last is saved.
    pub save: Option<PathBuf>,
}

/// Biases of 3 and heads of odd sizes; tied output.
pub fn gpt2() -> TransformerConfig {
    TransformerConfig {
        heads: 3,
        kv_heads: 3,
        ..TransformerConfig::gpt2(17, 15, 2, 3, 11)
    }
}

/// No parameter is read twice, so that sums round alike however parameters are shared out.
pub fn llama() -> TransformerConfig {
    TransformerConfig::llama(17, 18, 2, 3, 11)
}

pub fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

/// Of a rank.
pub struct Outcome {
    pub losses: Vec<f64>,
    /// Of the last step, summed.
    pub gradients: BTreeMap<String, Values>,
}

impl Run {
    pub fn new(model: TransformerConfig, mesh: MeshShape, shared: Shared, steps: Range<u64>) -> Self {
        Self {
            model,
            mesh,
            shared,
            clip: None,
            from: None,
            steps,
            save: None,
        }
    }

    pub fn from(self, folder: &Path) -> Self {
        let from = Some(folder.to_path_buf());
        Self { from, ..self }
    }

    pub fn save(self, folder: &Path) -> Self {
        let save = Some(folder.to_path_buf());
        Self { save, ..self }
    }

    pub fn clip(self, norm: f64) -> Self {
        Self {
            clip: Some(norm),
            ..self
        }
    }

    /// The losses; they are the same on every rank.
    pub fn losses(&self) -> Vec<f64> {
        let mut ranks = self.run().into_iter();
        let first = ranks.next().expect("a mesh has ranks").losses;
        for other in ranks {
            assert_eq!(first, other.losses, "{self:?}");
        }
        first
    }

    pub fn run(&self) -> Vec<Outcome> {
        // A loaded model must not be the one that it would have been.
        let seed = if self.from.is_some() { 6 } else { 5 };
        let device = Device::flex().autodiff();
        let model = seeded(&device, seed, |device| self.model.init(device));
        launch_module(&config(self.mesh), &device, model, |device, model| {
            self.rank(&device, model)
        })
        .unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    fn rank(&self, device: &SpDevice, model: Transformer) -> Outcome {
        let (model, layouts) = model.shard(device);
        let (mut model, layouts, shards) = match self.shared {
            Shared::Parameters => {
                let (model, shards) = shard_parameters(model, device, &layouts);
                (model, shards.layouts().clone(), shards)
            }
            _ => (model, layouts, ParamShards::default()),
        };
        let options = ForwardOptions {
            memory: MemoryOptions {
                recompute: match self.shared {
                    Shared::Parameters => Recompute::Blocks,
                    _ => Recompute::None,
                },
                shards: shards.clone(),
                ..MemoryOptions::default()
            },
            ..ForwardOptions::default()
        };
        let store = |folder: &Path| {
            let store = StateStore::new(folder, device);
            store.with_layouts(&layouts).with_shards(&shards)
        };
        let (mut whole, mut parts) = (adamw(), ShardedOptimizer::new(adamw()));
        if let Some(folder) = &self.from {
            let info;
            match self.shared {
                Shared::Moments => (model, parts, info) = store(folder).load(model, parts).unwrap(),
                _ => (model, whole, info) = store(folder).load(model, whole).unwrap(),
            }
            assert_eq!(info, self.info(self.steps.start));
        }
        let mesh = device.mesh();
        let (mut losses, mut gradients) = (Vec::new(), BTreeMap::new());
        for step in self.steps.clone() {
            let ids: Vec<i64> = (0..4 * 12).map(|i| (i * i * 7 + 3 * i + step as i64) % 17).collect();
            let windows = Tensor::<2, Int>::from_data(TensorData::new(ids, [4, 12]), device.device());
            let (tokens, labels) = tokens_and_labels(windows, device);
            let loss = model.loss(tokens, &labels, valid_tokens([&labels]), &options);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            losses.push(loss.value());
            match self.shared {
                Shared::Moments => (model, _) = parts.step(0.01, model, grads, self.clip, &layouts, mesh),
                _ => {
                    let grads = sum_gradients(&model, grads, &layouts, mesh);
                    gradients = gradients_by_path(&model, &grads);
                    let (grads, _) = clip_by_global_norm(&model, grads, self.clip, &layouts, mesh);
                    model = whole.step(0.01, model, grads);
                }
            }
        }
        if let Some(folder) = &self.save {
            let info = self.info(self.steps.end);
            let saved = match self.shared {
                Shared::Moments => store(folder).save(&info, &model, &parts),
                _ => store(folder).save(&info, &model, &whole),
            };
            assert_eq!(saved, Ok(folder.join(format!("step-{:06}", self.steps.end))));
        }
        Outcome { losses, gradients }
    }

    /// What the run says of itself after a step.
    fn info(&self, step: u64) -> StateInfo {
        let config = serde_json::json!({ "layers": self.model.layers, "name": "tiny" });
        StateInfo { step, seed: 5, config }
    }
}

/// The tensors of a state, by name; numbers of the optimizer are left out.
pub fn tensors(state: &Path) -> BTreeMap<String, Values> {
    let bytes = fs::read(state.join("state.safetensors")).unwrap();
    let file = Fixture::new(&bytes);
    let names = file
        .names()
        .into_iter()
        .filter(|name| !name.ends_with("/momentum.time"));
    names
        .map(|name| (name.to_owned(), Values::from(file.data(name))))
        .collect()
}
