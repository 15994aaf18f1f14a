//! What is loaded and saved again is what it was, byte by byte.

use std::collections::BTreeMap;
use std::fs;

use burn::tensor::{DType, Device};
use burn_sp_models::transformer::{HuggingFace, TransformerConfig};
use burn_sp_tests::parameters_by_path;
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::json;

use super::checkpoint::{
    CONFIG, FAMILIES, Family, INDEX, TENSORS, Tensors, contents, read_json, read_tensors, shard, write_json,
    write_tensors,
};
use crate::folder;

#[test]
fn one_file_is_what_it_was() {
    for family in FAMILIES {
        let (from, to) = (family.checkpoint("bytes"), folder("bytes").join("saved"));
        for name in ["tokenizer.json", "merges.txt", "generation_config.json"] {
            fs::write(from.join(name), name).unwrap();
        }
        fs::write(from.join("README.md"), "stays where it is").unwrap();
        let checkpoint = HuggingFace::open(&from).unwrap();
        let model = checkpoint.load(&Device::flex()).unwrap();
        checkpoint.save(&model, &to).unwrap();
        let (mut from, to) = (contents(&from), contents(&to));
        from.remove("README.md");
        assert_eq!(from.keys().collect::<Vec<_>>(), to.keys().collect::<Vec<_>>());
        for (name, bytes) in from {
            match name.as_str() {
                CONFIG => {
                    let saved: serde_json::Value = serde_json::from_slice(&to[CONFIG]).unwrap();
                    assert_eq!(saved, family.settings());
                }
                _ => assert!(to[&name] == bytes, "{family:?}: {name}"),
            }
        }
    }
}

#[test]
fn several_files_are_what_they_were() {
    for family in FAMILIES {
        let (from, to) = (family.sharded_checkpoint("bytes-sharded"), folder("bytes-sharded"));
        let checkpoint = HuggingFace::open(&from).unwrap();
        // Over an empty folder.
        checkpoint
            .save(&checkpoint.load(&Device::flex()).unwrap(), &to)
            .unwrap();
        let (found, expected) = (contents(&to), contents(&from));
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for number in 0..3 {
            let name = shard(number);
            assert!(found[&name] == expected[&name], "{family:?}: {name}");
        }
        let (found, expected) = (read_json(&to.join(INDEX)), read_json(&from.join(INDEX)));
        assert_eq!(found["weight_map"], expected["weight_map"]);
        let parameters = checkpoint.config().init(&Device::flex());
        let parameters = burn::module::Module::num_params(&parameters);
        let metadata = json!({ "total_parameters": parameters, "total_size": 4 * parameters });
        assert_eq!(found["metadata"], metadata);
    }
}

/// A family's tensors in 2 bytes an element.
fn halves(family: Family, dtype: Dtype) -> Tensors {
    let mut tensors = read_tensors(family.weights());
    for (own, _, bytes) in tensors.values_mut() {
        *own = dtype;
        let floats = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        *bytes = match dtype {
            Dtype::BF16 => floats.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => floats.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        };
    }
    tensors
}

/// Norms in 4 bytes, as some checkpoints have them; then the order of tensors is no more that of the names.
fn mixed(family: Family) -> Tensors {
    let mut tensors = halves(family, Dtype::BF16);
    for (name, tensor) in read_tensors(family.weights()) {
        if name.contains("norm") || name.contains("ln_") {
            tensors.insert(name, tensor);
        }
    }
    tensors
}

#[test]
fn smaller_floats_are_what_they_were() {
    for family in FAMILIES {
        for (name, tensors) in [
            ("bf16", halves(family, Dtype::BF16)),
            ("f16", halves(family, Dtype::F16)),
            ("mixed", mixed(family)),
        ] {
            let (from, to) = (family.checkpoint(name), folder("smaller").join(name));
            write_tensors(&from.join(TENSORS), &tensors);
            let checkpoint = HuggingFace::open(&from).unwrap();
            for dtype in [DType::F32, DType::F64] {
                let model = checkpoint.load_as(dtype, &Device::flex()).unwrap();
                assert_eq!(model.embedding.weight.val().dtype(), dtype);
                // The second time over the first.
                checkpoint.save(&model, &to).unwrap();
                assert!(contents(&from)[TENSORS] == contents(&to)[TENSORS], "{family:?} {name}");
            }
        }
    }
}

/// In another dtype and in small files, over the checkpoint that it was read from.
#[test]
fn a_checkpoint_is_replaced() {
    for family in FAMILIES {
        let folder = family.checkpoint("replaced");
        fs::write(folder.join("vocab.json"), "{}").unwrap();
        let checkpoint = HuggingFace::open(&folder).unwrap();
        let model = checkpoint.load(&Device::flex()).unwrap();
        let small = checkpoint.with_dtype(DType::BF16).with_shard_size(40_000);
        small.save(&model, &folder).unwrap();
        let expected = halves(family, Dtype::BF16);
        let mut found = Tensors::new();
        let files = contents(&folder);
        let shards: Vec<&String> = files.keys().filter(|name| name.starts_with("model-")).collect();
        assert!(shards.len() > 3, "{shards:?}");
        let places = read_json(&folder.join(INDEX))["weight_map"].clone();
        for (number, name) in shards.iter().enumerate() {
            let expected = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
            assert_eq!(**name, expected);
            let tensors = read_tensors(&files[*name]);
            let bytes: usize = tensors.values().map(|(.., bytes)| bytes.len()).sum();
            assert!(bytes <= 40_000 || tensors.len() == 1, "{name} has {bytes}");
            for tensor in tensors.keys() {
                assert_eq!(places[tensor], **name);
            }
            found.extend(tensors);
        }
        assert!(found == expected, "{family:?}");
        let mut settings = family.settings();
        settings["dtype"] = json!("bfloat16");
        assert_eq!(read_json(&folder.join(CONFIG)), settings);
        let others: Vec<&String> = files.keys().filter(|name| !name.starts_with("model-")).collect();
        assert_eq!(others, [CONFIG, INDEX, "vocab.json"]);
        assert!(!folder.with_file_name(".Llama-replaced.old").exists());
        let again = HuggingFace::open(&folder).unwrap().load(&Device::flex()).unwrap();
        let exact = parameters_by_path(&model);
        for (path, values) in parameters_by_path(&again) {
            let rounded = exact[&path].elements.iter();
            let rounded: Vec<f64> = rounded.map(|x| bf16::from_f32(*x as f32).to_f64()).collect();
            assert!(values.elements == rounded, "{family:?}: {path}");
        }
    }
}

/// As old checkpoints of GPT-2 are: no prefix, the masks of attention, the tied output layer a second time.
#[test]
fn old_names_are_kept() {
    let from = Family::Gpt2.checkpoint("old-names");
    let mut tensors: Tensors = read_tensors(Family::Gpt2.weights())
        .into_iter()
        .map(|(name, tensor)| (name.strip_prefix("transformer.").unwrap().to_owned(), tensor))
        .collect();
    let head = tensors["wte.weight"].clone();
    tensors.insert("lm_head.weight".into(), head);
    let parameters = tensors.clone();
    tensors.insert("h.1.attn.bias".into(), (Dtype::U8, vec![1, 1, 2, 2], vec![1, 0, 1, 1]));
    tensors.insert("h.1.attn.masked_bias".into(), (Dtype::F32, vec![], vec![0; 4]));
    write_tensors(&from.join(TENSORS), &tensors);
    let checkpoint = HuggingFace::open(&from).unwrap();
    let model = checkpoint.load(&Device::flex()).unwrap();
    let to = folder("old-names");
    checkpoint.save(&model, &to).unwrap();
    assert!(read_tensors(&contents(&to)[TENSORS]) == parameters);
}

/// Models that were none of transformers' before, of all that the two shapes may have.
#[test]
fn a_new_checkpoint_describes_its_model() {
    let scaled = burn_sp::nn::RotaryScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_length: 8192,
    };
    let mut llama = TransformerConfig::llama(11, 12, 2, 4, 7);
    llama.kv_heads = 2;
    llama.head_dim = 6;
    llama.bias = true;
    llama.tie_embeddings = true;
    llama.epsilon = 1e-6;
    llama.rotary_scaling = scaled;
    let linear = TransformerConfig {
        rotary_scaling: burn_sp::nn::RotaryScaling::Linear { factor: 2.5 },
        tie_embeddings: false,
        ..llama.clone()
    };
    let mut gpt2 = TransformerConfig::gpt2(11, 12, 2, 4, 9);
    gpt2.ffn_size = 5;
    gpt2.tie_embeddings = false;
    gpt2.dropout = 0.25;
    gpt2.attention_dropout = 0.5;
    for (name, config) in [("llama", llama), ("linear", linear), ("gpt2", gpt2)] {
        let folder = folder("new").join(name);
        let model = config.init(&Device::flex());
        HuggingFace::new(&config).unwrap().save(&model, &folder).unwrap();
        let checkpoint = HuggingFace::open(&folder).unwrap();
        assert_eq!(format!("{:?}", checkpoint.config()), format!("{config:?}"));
        let loaded = checkpoint.load(&Device::flex()).unwrap();
        assert_eq!(parameters_by_path(&loaded), parameters_by_path(&model));
        assert_eq!(loaded.rotary_scaling, config.rotary_scaling);
        assert_eq!(read_json(&folder.join(CONFIG))["torch_dtype"], "float32");
    }
}

/// Where versions of transformers put the wavelengths, and what they leave out.
#[test]
fn all_ways_to_write_a_configuration_are_one() {
    let folder = Family::Llama.checkpoint("ways");
    let written = |changes: &[(&str, serde_json::Value)]| {
        let mut settings = Family::Llama.settings();
        for (key, value) in changes {
            settings[key] = value.clone();
        }
        write_json(&folder.join(CONFIG), &settings);
        format!("{:?}", HuggingFace::open(&folder).unwrap().config())
    };
    let llama3 = json!({
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    });
    let ways: BTreeMap<&str, Vec<String>> = BTreeMap::from([
        (
            "plain",
            vec![
                written(&[("rope_parameters", json!({ "rope_type": "default", "rope_theta": 5e5 }))]),
                written(&[("rope_parameters", json!(null)), ("rope_theta", json!(5e5))]),
                written(&[
                    ("rope_parameters", json!(null)),
                    ("rope_theta", json!(500000)),
                    ("rope_scaling", json!(null)),
                    ("head_dim", json!(null)),
                    ("pretraining_tp", json!(2)),
                ]),
            ],
        ),
        (
            "llama3",
            vec![
                written(&[("rope_parameters", llama3.clone())]),
                written(&[
                    ("rope_parameters", json!(null)),
                    ("rope_theta", json!(5e5)),
                    ("rope_scaling", llama3),
                ]),
            ],
        ),
        (
            "linear",
            vec![
                written(&[("rope_parameters", json!({ "rope_type": "linear", "factor": 2.0 }))]),
                written(&[
                    ("rope_parameters", json!(null)),
                    ("rope_scaling", json!({ "type": "linear", "factor": 2.0 })),
                ]),
            ],
        ),
    ]);
    for (kind, ways) in &ways {
        assert!(ways.iter().all(|way| *way == ways[0]), "{kind}: {ways:#?}");
    }
    let first: Vec<&String> = ways.values().map(|ways| &ways[0]).collect();
    assert!(first[0] != first[1] && first[1] != first[2] && first[0] != first[2]);
}
