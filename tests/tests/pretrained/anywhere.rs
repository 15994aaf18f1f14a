//! Trained on one mesh, saved whole, loaded on another: as a checkpoint of transformers and as a record of Burn's.

use burn::module::{Module, list_param_ids};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sp::layout::MeshShape;
use burn_sp::train::{ParamLayouts, ParamShards, shard_parameters, sum_gradients, valid_tokens, whole_module};
use burn_sp::{SpDevice, launch_module};
use burn_sp_models::transformer::{
    ForwardOptions, HuggingFace, MemoryOptions, Recompute, Transformer, TransformerConfig, tokens_and_labels,
};
use burn_sp_tests::{Values, parameters_by_path};

use super::checkpoint::{FAMILIES, Family};
use crate::common::{config, mesh, near};
use crate::folder;

/// A rank's part of a model.
struct Part {
    model: Transformer,
    layouts: ParamLayouts,
    shards: ParamShards,
    options: ForwardOptions,
}

impl Part {
    fn new(model: Transformer, share_out: bool, device: &SpDevice) -> Self {
        let (model, layouts) = model.shard(device);
        let (model, shards) = match share_out {
            true => shard_parameters(model, device, &layouts),
            false => (model, ParamShards::default()),
        };
        let memory = MemoryOptions {
            recompute: Recompute::Blocks,
            shards: shards.clone(),
            ..MemoryOptions::default()
        };
        Self {
            layouts: if share_out { shards.layouts().clone() } else { layouts },
            options: ForwardOptions {
                memory,
                ..ForwardOptions::default()
            },
            model,
            shards,
        }
    }

    fn train(&mut self, device: &SpDevice) {
        let mut optimizer = AdamWConfig::new().init();
        for step in 0..2 {
            let (tokens, labels) = tokens_and_labels(windows(step, device), device);
            let count = valid_tokens([&labels]);
            let loss = self.model.loss(tokens, &labels, count, &self.options);
            let grads = GradientsParams::from_grads(loss.backward(), &self.model);
            let grads = sum_gradients(&self.model, grads, &self.layouts, device.mesh());
            self.model = optimizer.step(1e-2, self.model.clone(), grads);
        }
    }

    fn logits(&self, device: &SpDevice) -> Values {
        let (tokens, _) = tokens_and_labels(windows(7, device), device);
        Values::of(self.model.logits(tokens, &self.options).gather().local())
    }
}

fn windows(step: i64, device: &SpDevice) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..2 * 10).map(|i| (i * i * 7 + 3 * i + step) % 128).collect();
    Tensor::from_data(TensorData::new(ids, [2, 10]), device.device())
}

fn meshes() -> [MeshShape; 4] {
    let dp_tp = MeshShape {
        dp: 2,
        ..MeshShape::tp(2)
    };
    [MeshShape::tp(2), MeshShape::tp(4), mesh(1, 1, 2), dp_tp]
}

fn survives(family: Family, mesh: MeshShape, share_out: bool) {
    let context = format!("{family:?} on {mesh}, shared out: {share_out}");
    let device = Device::flex().autodiff();
    let opened = HuggingFace::open(family.checkpoint("anywhere")).unwrap();
    let (saved, record) = (folder("anywhere"), folder("records").join("whole.bpk"));
    let before = opened.load(&device).unwrap();
    let trained = launch_module(&config(mesh), &device, before.clone(), |device, model| {
        let mut part = Part::new(model, share_out, &device);
        part.train(&device);
        let whole = whole_module(&part.model, &part.layouts, &part.shards, &device);
        assert_eq!(whole.is_some(), device.rank() == 0);
        if let Some(whole) = whole {
            assert!(whole.embedding.weight.is_require_grad());
            opened.save(&whole, &saved).unwrap();
            whole.save_file(&record).unwrap();
        }
        part.logits(&device)
    });
    let trained = trained.unwrap_or_else(|error| panic!("{context}: {error}"));

    let checkpoint = HuggingFace::open(&saved).unwrap();
    let loaded = checkpoint.load(&device).unwrap();
    let parameters = parameters_by_path(&loaded);
    let recorded = checkpoint.config().init(&device).load_file(&record);
    for (path, values) in &parameters_by_path(&recorded) {
        assert!(values.same_bits(&parameters[path]), "{context}: {path}");
    }
    let before = parameters_by_path(&before);
    assert!(
        parameters.iter().all(|(path, values)| *values != before[path]),
        "{context}"
    );

    for other in [MeshShape::default(), MeshShape::tp(2), mesh_of_four()] {
        for (kind, model) in [("checkpoint", &loaded), ("record", &recorded)] {
            let found = launch_module(&config(other), &device, model.clone(), |device, model| {
                Part::new(model, !share_out, &device).logits(&device)
            });
            let found = found.unwrap_or_else(|error| panic!("{context}, {kind} on {other}: {error}"));
            for found in found {
                let allowed = 1e-6 * trained[0].peak();
                let context = format!("{context}, {kind} on {other}");
                near(&found.elements, &trained[0].elements, allowed, &context);
            }
        }
    }
}

fn mesh_of_four() -> MeshShape {
    mesh(2, 1, 2)
}

/// Whatever ranks hold, put together it is the model, bit by bit and under the same ids.
#[test]
fn whole_is_what_it_was() {
    for (config, all) in [
        (
            TransformerConfig::gpt2(17, 15, 2, 3, 11),
            [mesh(1, 1, 2), mesh(2, 2, 1), MeshShape::tp(3)],
        ),
        (
            TransformerConfig::llama(17, 18, 2, 3, 11),
            [mesh(3, 1, 1), MeshShape::tp(2), meshes()[3]],
        ),
    ] {
        let device = Device::flex().autodiff();
        let model = config.init(&device);
        for (mesh, share_out) in all.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
            let found = launch_module(&crate::common::config(mesh), &device, model.clone(), |device, model| {
                let ids = list_param_ids(&model);
                let part = Part::new(model, share_out, &device);
                let whole = whole_module(&part.model, &part.layouts, &part.shards, &device);
                whole.inspect(|whole| assert_eq!(list_param_ids(whole), ids))
            });
            let mut found = found.unwrap_or_else(|error| panic!("{mesh}: {error}"));
            assert!(found[1..].iter().all(Option::is_none), "{mesh}");
            let found = parameters_by_path(&found.swap_remove(0).expect("rank 0 has it"));
            assert!(found == parameters_by_path(&model), "{mesh}, shared out: {share_out}");
        }
    }
}

#[test]
fn models_survive_any_change_of_mesh() {
    for family in FAMILIES {
        for mesh in meshes() {
            for share_out in [false, true] {
                survives(family, mesh, share_out);
            }
        }
    }
}

/// On the mesh that it was trained on, the same parameters give the same bits.
#[test]
fn logits_are_the_same_bits_on_the_same_mesh() {
    for family in FAMILIES {
        let device = Device::flex().autodiff();
        let opened = HuggingFace::open(family.checkpoint("bits")).unwrap();
        let saved = folder("bits");
        let mesh = MeshShape::tp(2);
        let trained = launch_module(
            &config(mesh),
            &device,
            opened.load(&device).unwrap(),
            |device, model| {
                let mut part = Part::new(model, true, &device);
                part.train(&device);
                if let Some(whole) = whole_module(&part.model, &part.layouts, &part.shards, &device) {
                    opened.save(&whole, &saved).unwrap();
                }
                part.logits(&device)
            },
        );
        let loaded = HuggingFace::open(&saved).unwrap().load(&device).unwrap();
        let again = launch_module(&config(mesh), &device, loaded, |device, model| {
            Part::new(model, true, &device).logits(&device)
        });
        for (trained, again) in trained.unwrap().iter().zip(&again.unwrap()) {
            assert!(trained.same_bits(again), "{family:?}");
        }
    }
}
