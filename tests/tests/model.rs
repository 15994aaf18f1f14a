//! Whole models: PyTorch's numbers for Hugging Face checkpoints, and tiny random models on many ranks against one.

mod common;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_sp::attention::KvMove;
use burn_sp::layout::{Axis, MeshShape, Placement};
use burn_sp::nn::DropoutKey;
use burn_sp::train::{ParamLayouts, clip_by_global_norm, sum_gradients, valid_tokens};
use burn_sp::{SpDevice, SpTensor, launch_module};
use burn_sp_models::transformer::{ForwardOptions, Transformer, TransformerConfig, next_token_labels};
use burn_sp_tests::{
    Comparison, Fixture, Outcome, Values, cast, gather_gradients, gradients_by_path, parameters_by_path,
};
use common::{config, mesh, near, token_meshes};

macro_rules! file {
    ($name:literal) => {
        Fixture::new(include_bytes!(concat!("../fixtures/", $name, ".safetensors")))
    };
}

/// A family of checkpoints, as its library names and shapes the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Family {
    Llama,
    Gpt2,
}

impl Family {
    fn config(self) -> TransformerConfig {
        match self {
            Family::Llama => {
                let mut config = TransformerConfig::llama(128, 64, 2, 8, 160);
                config.kv_heads = 4;
                config
            }
            Family::Gpt2 => TransformerConfig::gpt2(128, 64, 2, 8, 48),
        }
    }

    fn weights(self) -> Fixture<'static> {
        match self {
            Family::Llama => file!("llama/llama.weights"),
            Family::Gpt2 => file!("gpt2/gpt2.weights"),
        }
    }

    fn data(self) -> Fixture<'static> {
        match self {
            Family::Llama => file!("llama/llama.data"),
            Family::Gpt2 => file!("gpt2/gpt2.data"),
        }
    }

    fn gradients(self) -> Fixture<'static> {
        match self {
            Family::Llama => file!("llama/llama.grads_f64"),
            Family::Gpt2 => file!("gpt2/gpt2.grads_f64"),
        }
    }

    fn facts(self) -> serde_json::Value {
        let text = match self {
            Family::Llama => include_str!("../fixtures/llama/llama.json"),
            Family::Gpt2 => include_str!("../fixtures/gpt2/gpt2.json"),
        };
        serde_json::from_str(text).expect("valid JSON")
    }

    /// The checkpoint's tensor that a parameter is (or is a part of), and how.
    fn tensor(self, path: &str) -> (String, Form) {
        let parts: Vec<&str> = path
            .split('.')
            .filter(|part| !["Rms", "Layer"].contains(part))
            .collect();
        // Norms have gamma and beta here, weight and bias there.
        let kind = match parts.last() {
            Some(&"gamma" | &"weight") => "weight",
            _ => "bias",
        };
        match (self, parts.as_slice()) {
            (Family::Llama, ["embedding", ..]) => ("model.embed_tokens.weight".into(), Form::Same),
            (Family::Llama, ["norm", ..]) => ("model.norm.weight".into(), Form::Same),
            (Family::Llama, ["head", ..]) => ("lm_head.weight".into(), Form::Transposed),
            (Family::Llama, ["blocks", layer, rest @ ..]) => {
                let (name, form) = match rest {
                    ["norm1", ..] => ("input_layernorm", Form::Same),
                    ["norm2", ..] => ("post_attention_layernorm", Form::Same),
                    ["attention", "query", ..] => ("self_attn.q_proj", Form::Transposed),
                    ["attention", "key", ..] => ("self_attn.k_proj", Form::Transposed),
                    ["attention", "value", ..] => ("self_attn.v_proj", Form::Transposed),
                    ["attention", "output", ..] => ("self_attn.o_proj", Form::Transposed),
                    ["mlp", "gate", ..] => ("mlp.gate_proj", Form::Transposed),
                    ["mlp", "up", ..] => ("mlp.up_proj", Form::Transposed),
                    ["mlp", "down", ..] => ("mlp.down_proj", Form::Transposed),
                    _ => panic!("no tensor for {path}"),
                };
                (format!("model.layers.{layer}.{name}.weight"), form)
            }
            (Family::Gpt2, ["embedding", ..]) => ("transformer.wte.weight".into(), Form::Same),
            (Family::Gpt2, ["positions", ..]) => ("transformer.wpe.weight".into(), Form::Same),
            (Family::Gpt2, ["norm", ..]) => (format!("transformer.ln_f.{kind}"), Form::Same),
            (Family::Gpt2, ["blocks", layer, rest @ ..]) => {
                // GPT-2's linear layers are [in, out] already, and q, k, v are the thirds of one.
                let (name, form) = match rest {
                    ["norm1", ..] => ("ln_1", Form::Same),
                    ["norm2", ..] => ("ln_2", Form::Same),
                    ["attention", "query", ..] => ("attn.c_attn", Form::Third(0)),
                    ["attention", "key", ..] => ("attn.c_attn", Form::Third(1)),
                    ["attention", "value", ..] => ("attn.c_attn", Form::Third(2)),
                    ["attention", "output", ..] => ("attn.c_proj", Form::Same),
                    ["mlp", "up", ..] => ("mlp.c_fc", Form::Same),
                    ["mlp", "down", ..] => ("mlp.c_proj", Form::Same),
                    _ => panic!("no tensor for {path}"),
                };
                (format!("transformer.h.{layer}.{name}.{kind}"), form)
            }
            _ => panic!("no tensor for {path}"),
        }
    }

    /// A tensor of one of the family's files, as the parameter of this path has it.
    fn read(self, file: &Fixture<'_>, path: &str) -> Values {
        let (name, form) = self.tensor(path);
        let whole = Values::from(file.data(&name));
        let width = *whole.shape.last().expect("no scalars");
        let rows = whole.elements.len() / width;
        match form {
            Form::Same => whole,
            Form::Transposed => Values {
                shape: vec![width, rows],
                elements: (0..rows * width)
                    .map(|i| whole.elements[i % rows * width + i / rows])
                    .collect(),
                ..whole
            },
            Form::Third(third) => {
                let mut shape = whole.shape.clone();
                *shape.last_mut().expect("no scalars") = width / 3;
                let start = third * width / 3;
                let row = |row: &[f64]| row[start..start + width / 3].to_vec();
                Values {
                    shape,
                    elements: whole.elements.chunks(width).flat_map(row).collect(),
                    ..whole
                }
            }
        }
    }

    /// The model with the checkpoint's weights.
    fn load(self, dtype: DType) -> Transformer {
        let device = Device::flex();
        let model = self.config().init(&device).map(&mut Load {
            family: self,
            file: self.weights(),
            path: Vec::new(),
        });
        cast(model, dtype)
    }
}

/// How a parameter lies in its checkpoint's tensor.
#[derive(Clone, Copy)]
enum Form {
    Same,
    /// PyTorch's linear layers are [out, in].
    Transposed,
    /// These columns of three.
    Third(usize),
}

struct Load {
    family: Family,
    file: Fixture<'static>,
    path: Vec<String>,
}

impl ModuleMapper for Load {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let values = self.family.read(&self.file, &path);
        param.map(|tensor| {
            assert_eq!(tensor.dims().as_slice(), values.shape, "{path}");
            let data = TensorData::new(values.elements, values.shape).convert_dtype(DType::F32);
            Tensor::from_data(data, &tensor.device())
        })
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// Ulysses, gather, both, samples too; tensor parallelism, alone and with ulysses.
fn meshes() -> Vec<MeshShape> {
    let others = [
        mesh(1, 1, 1),
        mesh(2, 1, 2),
        MeshShape::tp(2),
        MeshShape::tp(8),
        MeshShape {
            ulysses: 2,
            ..MeshShape::tp(2)
        },
    ];
    token_meshes().into_iter().chain(others).collect()
}

/// The rank's rows of a `[batch, tokens, width]` reference.
fn rows(x: &SpTensor<3>, reference: &[f64]) -> Vec<f64> {
    let [_, tokens, width] = x.global_shape() else {
        panic!("three dimensions")
    };
    let positions: Vec<usize> = x.positions(1).iter().collect();
    let row = |b: usize, s: usize| reference[(b * tokens + s) * width..][..*width].to_vec();
    x.positions(0)
        .iter()
        .flat_map(|b| positions.iter().flat_map(move |s| row(b, *s)).collect::<Vec<_>>())
        .collect()
}

/// Logits, loss and every gradient against an independent f64 computation, in f32 within PyTorch's own error (with the
/// fixtures' headroom), in f64 to the last digits.
fn checkpoint_is_pytorchs(family: Family) {
    let facts = family.facts();
    let tolerance = |name: &str, kind: &str| facts["tolerances"][name][kind].as_f64().expect("a number");
    for dtype in [DType::F32, DType::F64] {
        // Between two f64 computations only the order of sums differs.
        let atol = |name: &str| {
            if dtype == DType::F64 {
                1e-12
            } else {
                tolerance(name, "suggested_atol")
            }
        };
        let gradient_rtol = if dtype == DType::F64 {
            1e-12
        } else {
            tolerance("every gradient", "suggested_rel_to_peak")
        };
        let model = family.load(dtype).train();
        for mesh in meshes() {
            let context = format!("{family:?} in {} on {mesh}", dtype.name());
            let results = launch_module(
                &config(mesh),
                &Device::flex().autodiff(),
                model.clone(),
                |device, model| {
                    let (data, gradients) = (family.data(), family.gradients());
                    let tokens = device.distribute_tokens(data.int("input_ids", device.device()));
                    let shifted = next_token_labels(data.int("labels", device.device()));
                    let integers = |data: TensorData| data.iter::<i64>().collect::<Vec<_>>();
                    assert_eq!(
                        integers(shifted.to_data()),
                        integers(data.data("labels_shifted")),
                        "{context}"
                    );
                    let labels = device.distribute_tokens(shifted);
                    let count = valid_tokens([&labels]);
                    assert_eq!(count, 34, "{context}");
                    let (model, layouts) = model.shard(&device);
                    let options = &ForwardOptions::default();

                    let logits = model.logits(tokens.clone(), options);
                    let logits = logits.redistribute(Axis::Tp, Placement::Replicate);
                    let expected = rows(&logits, &data.f64s("logits_f64"));
                    near(
                        &common::f64s(logits.local()),
                        &expected,
                        atol("logits"),
                        &format!("{context}: logits"),
                    );
                    let loss = model.loss(tokens, &labels, count, options);
                    near(
                        &[loss.value()],
                        &data.f64s("loss_f64"),
                        atol("loss"),
                        &format!("{context}: loss"),
                    );

                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    let grads = sum_gradients(&model, grads, &layouts, device.mesh());
                    let grads = gather_gradients(&model, grads, &layouts, &device);
                    let grads = gradients_by_path(&model, &grads);
                    assert_eq!(
                        grads.len(),
                        parameters_by_path(&model).len(),
                        "{context}: every parameter has one"
                    );
                    for (path, found) in &grads {
                        let expected = family.read(&gradients, path);
                        assert_eq!(found.shape, expected.shape, "{context}: {path}");
                        // A gradient that is truly 0 (a key bias) is noise beside its layer's others: judge it by the usual peak.
                        let atol = gradient_rtol * if expected.peak() < 1e-9 { 0.1 } else { expected.peak() };
                        near(
                            &found.elements,
                            &expected.elements,
                            atol,
                            &format!("{context}: gradient of {path}"),
                        );
                    }
                    grads
                },
            );
            let results = results.unwrap_or_else(|error| panic!("{context}: {error}"));
            for (rank, grads) in results.iter().enumerate() {
                for (path, grad) in grads {
                    assert!(
                        results[0][path].same_bits(grad),
                        "{context}: {path} differs on rank {rank}"
                    );
                }
            }
        }
    }
}

#[test]
fn llama_is_pytorchs() {
    checkpoint_is_pytorchs(Family::Llama);
}

#[test]
fn gpt2_is_pytorchs() {
    checkpoint_is_pytorchs(Family::Gpt2);
}

/// The residual stream after the embedding and after each block, as the last norm shows it.
#[test]
fn the_residual_streams_are_pytorchs() {
    for family in [Family::Llama, Family::Gpt2] {
        let facts = family.facts();
        let rtol = facts["tolerances"]["hidden.1"]["suggested_rel_to_peak"]
            .as_f64()
            .expect("a number");
        for (dtype, rtol) in [(DType::F32, rtol), (DType::F64, 1e-12)] {
            for layers in 0..=2 {
                let mut model = family.load(dtype);
                model.blocks.truncate(layers);
                let stream = family
                    .data()
                    .float::<3>(&format!("hidden.{layers}_f64"), DType::F64, &Device::flex());
                let expected = Values::of(&cast(model.clone(), DType::F64).norm.forward(stream));
                for mesh in meshes() {
                    let context = format!("{family:?} in {} on {mesh}: hidden.{layers}", dtype.name());
                    let results = launch_module(&config(mesh), &Device::flex(), model.clone(), |device, model| {
                        let tokens = device.distribute_tokens(family.data().int("input_ids", device.device()));
                        let (model, _) = model.shard(&device);
                        let found = model.forward(tokens, &ForwardOptions::default());
                        let allowed = rtol * expected.peak();
                        near(
                            &common::f64s(found.local()),
                            &rows(&found, &expected.elements),
                            allowed,
                            &context,
                        );
                    });
                    results.unwrap_or_else(|error| panic!("{context}: {error}"));
                }
            }
        }
    }
}

/// Five steps of AdamW, AdamW with clipping, and Adam, on every mesh.
#[test]
fn five_steps_are_pytorchs() {
    let facts: serde_json::Value =
        serde_json::from_str(include_str!("../fixtures/adamw/adamw.json")).expect("valid JSON");
    for run in ["adamw", "adamw_clip", "adam"] {
        let facts = &facts["runs"][run];
        let suggested = |name: &str| facts["suggested"][name].as_f64().expect("a number");
        let list = |name: &str| -> Vec<f64> {
            facts[name]
                .as_array()
                .expect("a list")
                .iter()
                .map(|x| x.as_f64().expect("a number"))
                .collect()
        };
        let (losses, norms) = (list("loss_per_step_f64"), list("grad_norm_before_clip_per_step_f64"));
        let max_norm = facts["clip_max_norm"].as_f64();
        let model = Family::Llama.load(DType::F32).train();
        for mesh in [mesh(1, 1, 1), mesh(1, 1, 4), mesh(1, 2, 1), mesh(2, 1, 2)] {
            let context = format!("{run} on {mesh}");
            let results = launch_module(
                &config(mesh),
                &Device::flex().autodiff(),
                model.clone(),
                |device, mut model| {
                    let mut optimizer = match run {
                        "adam" => AdamConfig::new()
                            .with_beta_1(0.9)
                            .with_beta_2(0.95)
                            .with_epsilon(1e-8)
                            .init(),
                        _ => AdamWConfig::new()
                            .with_beta_1(0.9)
                            .with_beta_2(0.95)
                            .with_epsilon(1e-8)
                            .with_weight_decay(0.1)
                            .init(),
                    };
                    let batches = file!("adamw/batches");
                    for step in 0..5 {
                        let int = |name: &str| batches.int::<2>(&format!("{name}.{step}"), device.device());
                        let tokens = device.distribute_tokens(int("input_ids"));
                        let labels = device.distribute_tokens(next_token_labels(int("labels")));
                        let loss = model.loss(tokens, &labels, valid_tokens([&labels]), &ForwardOptions::default());
                        near(
                            &[loss.value()],
                            &losses[step..=step],
                            suggested("loss_atol"),
                            &format!("{context}: loss {step}"),
                        );
                        let grads = GradientsParams::from_grads(loss.backward(), &model);
                        let layouts = ParamLayouts::replicated();
                        let grads = sum_gradients(&model, grads, &layouts, device.mesh());
                        let (grads, norm) = clip_by_global_norm(&model, grads, max_norm, &layouts, device.mesh());
                        let allowed = suggested("grad_norm_rtol") * norms[step];
                        near(
                            &[norm],
                            &norms[step..=step],
                            allowed,
                            &format!("{context}: norm {step}"),
                        );
                        model = optimizer.step(1e-3, model, grads);
                    }
                    parameters_by_path(&model)
                },
            );
            let results = results.unwrap_or_else(|error| panic!("{context}: {error}"));
            let expected = match run {
                "adamw" => file!("adamw/adamw.final"),
                "adam" => file!("adamw/adam.final"),
                _ => file!("adamw/adamw_clip.final_f64"),
            };
            let mut off: Vec<f64> = Vec::new();
            for (path, found) in &results[0] {
                let expected = Family::Llama.read(&expected, path);
                off.extend(
                    found
                        .elements
                        .iter()
                        .zip(&expected.elements)
                        .map(|(a, b)| (a - b).abs()),
                );
                for (rank, other) in results.iter().enumerate() {
                    assert!(
                        found.same_bits(&other[path]),
                        "{context}: {path} differs on rank {rank}"
                    );
                }
            }
            off.sort_by(f64::total_cmp);
            let (p999, max) = (off[off.len() * 999 / 1000], off[off.len() - 1]);
            assert!(
                p999 <= suggested("weights_p999_atol"),
                "{context}: 99.9 % of weights are within {p999:e}"
            );
            assert!(
                max <= suggested("weights_max_atol"),
                "{context}: all weights are within {max:e}"
            );
        }
    }
}

fn ids(device: &SpDevice, batch: usize, tokens: usize, vocab: i64) -> Tensor<2, Int> {
    let ids: Vec<i64> = common::noise(9, batch * tokens)
        .iter()
        .map(|x| ((x + 1.0) * 1e5) as i64 % vocab)
        .collect();
    Tensor::from_data(TensorData::new(ids, [batch, tokens]), device.device())
}

/// A tiny random model of either family, larger than it is at its start, so that nothing is lost in rounding.
fn tiny(family: Family, heads: usize, kv_heads: usize, dropout: f64) -> TransformerConfig {
    let hidden = 4 * heads;
    let mut config = match family {
        Family::Llama => TransformerConfig::llama(32, hidden, 2, heads, 20),
        Family::Gpt2 => TransformerConfig::gpt2(32, hidden, 2, heads, 1024),
    };
    config.kv_heads = kv_heads;
    config.dropout = dropout;
    config.init_std = 0.2;
    config
}

fn compare(config: &TransformerConfig, batch: usize, tokens: usize, meshes: Vec<MeshShape>) {
    let model = burn_sp::seeded(&Device::flex(), 5, |device| config.init(device));
    let report = Comparison::new(model)
        .shard_by(Transformer::shard)
        .on(meshes)
        .run(|rank, model| {
            let whole = ids(rank.device(), batch, tokens, 32);
            let labels = rank.device().distribute_tokens(next_token_labels(whole.clone()));
            let tokens = rank.device().distribute_tokens(whole);
            let options = &ForwardOptions {
                kv: KvMove::Gather,
                dropout: Some(DropoutKey {
                    seed: 11,
                    step: 3,
                    layer: 0,
                }),
                ..ForwardOptions::default()
            };
            let hidden = model.forward(tokens.clone(), options);
            let loss = model.loss(tokens, &labels, valid_tokens([&labels]), options);
            Outcome::new(loss).output("hidden", &hidden)
        })
        .unwrap_or_else(|difference| panic!("{config:?}: {difference}"));
    println!("{report}");
}

/// Every parameter's gradient by name, with dropout: the mask does not depend on the mesh.
#[test]
fn tiny_models_agree_on_every_mesh() {
    for family in [Family::Llama, Family::Gpt2] {
        for (heads, kv_heads) in [(4, 4), (6, 2), (6, 6), (2, 1)] {
            let meshes = meshes()
                .into_iter()
                .chain([mesh(1, 1, 3), mesh(1, 3, 1), mesh(2, 2, 2)])
                .collect();
            compare(&tiny(family, heads, kv_heads, 0.1), 2, 13, meshes);
        }
    }
}

/// Without dropout too, and with fewer tokens than ranks.
#[test]
fn tiny_models_agree_on_few_tokens() {
    for tokens in [1, 2, 3] {
        compare(
            &tiny(Family::Llama, 6, 3, 0.0),
            2,
            tokens,
            vec![mesh(1, 1, 4), mesh(1, 4, 1), mesh(1, 2, 2)],
        );
    }
}

#[test]
fn a_sequence_of_1001_on_four_ranks() {
    for family in [Family::Llama, Family::Gpt2] {
        compare(
            &tiny(family, 6, 2, 0.1),
            1,
            1001,
            vec![mesh(1, 1, 4), mesh(1, 4, 1), mesh(1, 2, 2)],
        );
    }
}
