//! Logits, loss and every gradient of a loaded checkpoint against an independent f64 computation.

use std::fs;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_sp::launch_module;
use burn_sp::layout::{Axis, MeshShape, Placement};
use burn_sp::train::{sum_gradients, valid_tokens};
use burn_sp_models::transformer::{ForwardOptions, HuggingFace, Transformer, next_token_labels};
use burn_sp_tests::{Fixture, gather_gradients};

use super::checkpoint::{FAMILIES, Family, TENSORS};
use crate::common::{config, f64s, near};
use crate::folder;

fn data(family: Family) -> Fixture<'static> {
    Fixture::new(match family {
        Family::Llama => include_bytes!("../../fixtures/llama/llama.data.safetensors"),
        Family::Gpt2 => include_bytes!("../../fixtures/gpt2/gpt2.data.safetensors"),
    })
}

fn gradients(family: Family) -> Fixture<'static> {
    Fixture::new(match family {
        Family::Llama => include_bytes!("../../fixtures/llama/llama.grads_f64.safetensors"),
        Family::Gpt2 => include_bytes!("../../fixtures/gpt2/gpt2.grads_f64.safetensors"),
    })
}

/// The module whose parameters are a module's gradients, so that they can be saved under the checkpoint's names.
struct Gradients(GradientsParams);

impl ModuleMapper for Gradients {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let gradient = self.0.get::<D>(param.id).expect("every parameter has one");
        Param::initialized(param.id, gradient)
    }
}

/// In f32 within PyTorch's own error (with the fixtures' headroom), in f64 to the last digits.
fn checkpoint_is_pytorchs(family: Family, sharded: bool) {
    let kind = if sharded { "sharded" } else { "single" };
    let opened = HuggingFace::open(match sharded {
        true => family.sharded_checkpoint("pytorch-sharded"),
        false => family.checkpoint("pytorch-single"),
    })
    .unwrap();
    let facts = family.facts();
    let tolerance = |name: &str, kind: &str| facts["tolerances"][name][kind].as_f64().expect("a number");
    for dtype in [DType::F32, DType::F64] {
        let (atol, rtol) = match dtype {
            DType::F64 => ([1e-12; 2], 1e-12),
            _ => (
                ["logits", "loss"].map(|name| tolerance(name, "suggested_atol")),
                tolerance("every gradient", "suggested_rel_to_peak"),
            ),
        };
        let model = opened.load_as(dtype, &Device::flex().autodiff()).unwrap();
        for mesh in [MeshShape::default(), MeshShape::tp(2)] {
            let context = format!("{family:?}, {kind}, in {} on {mesh}", dtype.name());
            let device = Device::flex().autodiff();
            let results = launch_module(&config(mesh), &device, model.clone(), |device, model| {
                let data = data(family);
                let tokens = device.distribute_tokens(data.int("input_ids", device.device()));
                let labels = next_token_labels(data.int("labels", device.device()));
                let labels = device.distribute_tokens(labels);
                let (model, layouts) = model.shard(&device);
                let options = &ForwardOptions::default();
                let logits = model.logits(tokens.clone(), options);
                let logits = f64s(logits.redistribute(Axis::Tp, Placement::Replicate).local());
                near(
                    &logits,
                    &data.f64s("logits_f64"),
                    atol[0],
                    &format!("{context}: logits"),
                );
                let loss = model.loss(tokens, &labels, valid_tokens([&labels]), options);
                near(
                    &[loss.value()],
                    &data.f64s("loss_f64"),
                    atol[1],
                    &format!("{context}: loss"),
                );
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let grads = sum_gradients(&model, grads, &layouts, device.mesh());
                let grads = gather_gradients(&model, grads, &layouts, &device);
                model.map(&mut Gradients(grads))
            });
            let results: Vec<Transformer> = results.unwrap_or_else(|error| panic!("{context}: {error}"));
            let saved = folder(&format!("{family:?}-{kind}-gradients"));
            let format = HuggingFace::new(opened.config()).unwrap().with_dtype(DType::F64);
            format.save(&results[0], &saved).unwrap();
            let (saved, expected) = (fs::read(saved.join(TENSORS)).unwrap(), gradients(family));
            let found = Fixture::new(&saved);
            let sorted = |file: &Fixture<'_>| {
                let mut names: Vec<String> = file.names().into_iter().map(str::to_owned).collect();
                names.sort();
                names
            };
            assert_eq!(sorted(&found), sorted(&expected), "{context}");
            for name in found.names() {
                assert_eq!(
                    found.data(name).shape(),
                    expected.data(name).shape(),
                    "{context}: {name}"
                );
                let expected = expected.f64s(name);
                let peak = expected.iter().fold(0.0, |peak: f64, x| peak.max(x.abs()));
                // A gradient that is truly 0 is noise beside its layer's others: judge it by the usual peak.
                let atol = rtol * if peak < 1e-9 { 0.1 } else { peak };
                near(
                    &found.f64s(name),
                    &expected,
                    atol,
                    &format!("{context}: gradient of {name}"),
                );
            }
        }
    }
}

#[test]
fn checkpoints_compute_what_pytorch_does() {
    for family in FAMILIES {
        for sharded in [false, true] {
            checkpoint_is_pytorchs(family, sharded);
        }
    }
}
