//! Checkpoints that cannot be read or written: each is one line that says what, where and what would work.

use std::fs;
use std::path::Path;

use burn::tensor::{DType, Device};
use burn_sp::launch_module;
use burn_sp::layout::MeshShape;
use burn_sp_models::transformer::{HuggingFace, NormKind, TransformerConfig};
use burn_sp_tests::parameters_by_path;
use safetensors::Dtype;
use serde_json::json;

use super::checkpoint::{
    CONFIG, Family, INDEX, TENSORS, contents, read_json, read_tensors, shard, write_json, write_tensors,
};
use crate::common::{config, contains};
use crate::folder;

/// What is said of a folder, without its path.
fn refused(folder: &Path) -> String {
    let opened = HuggingFace::open(folder);
    let error = match opened.and_then(|checkpoint| checkpoint.load(&Device::flex())) {
        Ok(_) => panic!("{} is read", folder.display()),
        Err(error) => error.to_string(),
    };
    assert!(!error.contains('\n'), "{error}");
    error.replace(&folder.display().to_string(), "DIR")
}

#[test]
fn configurations_of_other_models_are_named() {
    for (family, key, value, expected) in [
        (
            Family::Llama,
            "model_type",
            json!("mamba"),
            "what can be read is \"llama\" or \"gpt2\"",
        ),
        (
            Family::Llama,
            "hidden_act",
            json!("gelu"),
            "what can be read is \"silu\"",
        ),
        (
            Family::Llama,
            "mlp_bias",
            json!(true),
            "what can be read is false, as attention_bias is",
        ),
        (
            Family::Llama,
            "quantization_config",
            json!({ "bits": 4 }),
            "what can be read is a checkpoint of plain floats",
        ),
        (
            Family::Llama,
            "hidden_size",
            json!("64"),
            "invalid type: string \"64\", expected usize",
        ),
        (
            Family::Llama,
            "rope_parameters",
            json!(3),
            "what can be read is an object",
        ),
        (
            Family::Gpt2,
            "activation_function",
            json!("gelu"),
            "what can be read is \"gelu_new\" or \"gelu_pytorch_tanh\" or \"gelu_fast\"",
        ),
        (
            Family::Gpt2,
            "scale_attn_weights",
            json!(false),
            "what can be read is true",
        ),
        (
            Family::Gpt2,
            "scale_attn_by_inverse_layer_idx",
            json!(true),
            "what can be read is false",
        ),
        (
            Family::Gpt2,
            "add_cross_attention",
            json!(true),
            "what can be read is false",
        ),
        (
            Family::Gpt2,
            "embd_pdrop",
            json!(0.5),
            "what can be read is 0, as resid_pdrop is",
        ),
    ] {
        let folder = family.checkpoint("other");
        let mut settings = family.settings();
        settings[key] = value.clone();
        write_json(&folder.join(CONFIG), &settings);
        assert_eq!(
            refused(&folder),
            format!("DIR/config.json: {key} is {value}; {expected}")
        );
    }
    for (rope, expected) in [
        (
            json!({ "rope_type": "yarn", "factor": 4.0 }),
            "rope_parameters.rope_type is \"yarn\"; what can be read is \"default\", \"linear\" or \"llama3\"",
        ),
        (
            json!({ "rope_type": "linear" }),
            "rope_parameters.factor is null; invalid type: null, expected f64",
        ),
        (
            json!({ "rope_type": "default", "partial_rotary_factor": 0.5 }),
            "rope_parameters.partial_rotary_factor is 0.5; what can be read is 1.0",
        ),
    ] {
        let folder = Family::Llama.checkpoint("rope");
        let mut settings = Family::Llama.settings();
        settings["rope_parameters"] = rope;
        write_json(&folder.join(CONFIG), &settings);
        assert_eq!(refused(&folder), format!("DIR/config.json: {expected}"));
    }
}

/// Values that are no model together are named by the keys of the file.
#[test]
fn problems_are_named_by_their_keys() {
    for (family, key, value, expected) in [
        (
            Family::Llama,
            "num_key_value_heads",
            json!(3),
            "8 num_attention_heads cannot share 3 num_key_value_heads; use one of [1, 2, 4, 8]",
        ),
        (
            Family::Llama,
            "intermediate_size",
            json!(0),
            "intermediate_size is 0; use at least 1",
        ),
        (
            Family::Llama,
            "rope_parameters",
            json!({ "rope_theta": -1 }),
            "rope_theta -1 is not above 0",
        ),
        (
            Family::Llama,
            "rms_norm_eps",
            json!(-1e-6),
            "rms_norm_eps -0.000001 is not 0 or above",
        ),
        (Family::Gpt2, "n_head", json!(0), "n_head is 0; use at least 1"),
        (
            Family::Gpt2,
            "n_positions",
            json!(0),
            "n_positions is 0; use at least 1",
        ),
        (
            Family::Gpt2,
            "attn_pdrop",
            json!(1.5),
            "attn_pdrop 1.5 is not in [0, 1)",
        ),
        (
            Family::Gpt2,
            "initializer_range",
            json!(-2),
            "initializer_range -2 is not 0 or above",
        ),
    ] {
        let folder = family.checkpoint("problem");
        let mut settings = family.settings();
        settings[key] = value;
        write_json(&folder.join(CONFIG), &settings);
        assert_eq!(refused(&folder), format!("DIR/config.json: {expected}"));
    }
}

#[test]
fn files_that_are_missing_or_cut_are_named() {
    let folder = Family::Llama.checkpoint("files");
    let whole = fs::read(folder.join(TENSORS)).unwrap();
    for length in [0, 7, 100, whole.len() - 1] {
        fs::write(folder.join(TENSORS), &whole[..length]).unwrap();
        contains(
            &refused(&folder),
            &[
                "DIR/model.safetensors: it is no whole safetensors file: ",
                "; get it again",
            ],
        );
    }
    fs::remove_file(folder.join(TENSORS)).unwrap();
    assert_eq!(
        refused(&folder),
        "DIR: it has no model.safetensors and no model.safetensors.index.json; save the checkpoint as safetensors"
    );
    fs::remove_file(folder.join(CONFIG)).unwrap();
    assert_eq!(
        refused(&folder),
        "DIR/config.json: No such file or directory (os error 2)"
    );
    fs::write(folder.join(CONFIG), "{").unwrap();
    contains(&refused(&folder), &["DIR/config.json: EOF while parsing"]);

    let folder = Family::Gpt2.sharded_checkpoint("files");
    fs::remove_file(folder.join(shard(1))).unwrap();
    let name = "model-00002-of-00003.safetensors";
    assert_eq!(
        refused(&folder),
        format!("DIR/{name}: No such file or directory (os error 2)")
    );
    let folder = Family::Gpt2.sharded_checkpoint("files");
    fs::copy(folder.join(shard(0)), folder.join(shard(1))).unwrap();
    contains(
        &refused(&folder),
        &["is in model-00001-of-00003.safetensors too; a tensor is in one file"],
    );
    let folder = Family::Gpt2.sharded_checkpoint("files");
    let mut index = read_json(&folder.join(INDEX));
    index["weight_map"]["transformer.wpe.weight"] = json!("../other.safetensors");
    write_json(&folder.join(INDEX), &index);
    contains(
        &refused(&folder),
        &["index.json: \"../other.safetensors\" is no name of a file"],
    );
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let folder = Family::Llama.checkpoint("tensors");
    let change = |change: &dyn Fn(&mut super::checkpoint::Tensors)| {
        let mut tensors = read_tensors(Family::Llama.weights());
        change(&mut tensors);
        write_tensors(&folder.join(TENSORS), &tensors);
        refused(&folder)
    };
    let (query, norm) = ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight");
    assert_eq!(
        change(&|tensors| tensors.get_mut(query).unwrap().1 = vec![32, 128]),
        format!(
            "DIR: {query:?} is [32, 128], but the model's blocks.1.attention.query.weight wants [64, 64]; \
             check the configuration"
        )
    );
    assert_eq!(
        change(&|tensors| drop(tensors.remove(norm))),
        "DIR: the checkpoint has no \"model.norm.weight\", which is the model's norm.Rms.gamma; give all of its files, \
         and its configuration"
    );
    let extra = (Dtype::F32, vec![1], vec![0; 4]);
    let name = "model.layers.2.input_layernorm.weight";
    assert_eq!(
        change(&|tensors| drop(tensors.insert(name.into(), extra.clone()))),
        "DIR: the model has no parameter for \"model.layers.2.input_layernorm.weight\"; it has fewer layers, or is another \
         kind of model"
    );
    assert_eq!(
        change(&|tensors| tensors.get_mut(norm).unwrap().0 = Dtype::I32),
        "DIR: \"model.norm.weight\" is of I32; a checkpoint can have F64, F32, F16 and BF16"
    );
    let without_head = change(&|tensors| drop(tensors.remove("lm_head.weight")));
    assert_eq!(
        without_head,
        "DIR/config.json: tie_word_embeddings is false; but \"lm_head.weight\" is missing; with true it is the token \
         embedding"
    );

    let folder = Family::Gpt2.checkpoint("tensors");
    let mut tensors = read_tensors(Family::Gpt2.weights());
    tensors.insert(
        "lm_head.weight".into(),
        (Dtype::F32, vec![128, 64], vec![0; 4 * 128 * 64]),
    );
    write_tensors(&folder.join(TENSORS), &tensors);
    assert_eq!(
        refused(&folder),
        "DIR/config.json: tie_word_embeddings is true; but \"lm_head.weight\" is not the token embedding; \
         with false both are read"
    );
}

#[test]
fn models_of_another_shape_are_not_saved() {
    let checkpoint = HuggingFace::open(Family::Llama.checkpoint("shape")).unwrap();
    let place = folder("shape").join("model");
    let other = TransformerConfig::llama(128, 64, 3, 8, 160).init(&Device::flex());
    let error = checkpoint.save(&other, &place).unwrap_err().to_string();
    contains(
        &error,
        &[
            "the model's blocks.0.attention.key.weight is [64, 64]",
            "makes it [64, 32]",
        ],
    );
    let model = checkpoint.load(&Device::flex()).unwrap();
    let errors = launch_module(
        &config(MeshShape::tp(2)),
        &Device::flex(),
        model.clone(),
        |device, model| {
            let (part, _) = model.shard(&device);
            checkpoint.save(&part, &place).unwrap_err().to_string()
        },
    );
    for error in errors.unwrap() {
        contains(&error, &["burn_sp::train::whole_module"]);
    }
    let mixed = TransformerConfig {
        norm: NormKind::Layer,
        ..TransformerConfig::llama(8, 8, 1, 1, 8)
    };
    let error = HuggingFace::new(&mixed).unwrap_err().to_string();
    contains(&error, &["neither of Llama's shape", "nor of GPT-2's"]);
    let new = HuggingFace::new(&TransformerConfig::llama(8, 8, 1, 1, 8)).unwrap();
    contains(
        &new.load(&Device::flex()).unwrap_err().to_string(),
        &["a new checkpoint has no weights"],
    );
    let error = checkpoint.load_as(DType::I32, &Device::flex()).unwrap_err().to_string();
    contains(&error, &["a model of i32 cannot be made; take F64, F32, F16 or BF16"]);
    let integers = checkpoint.with_dtype(DType::I32);
    contains(&integers.save(&model, &place).unwrap_err().to_string(), &["is of i32"]);
    assert!(!place.exists());
}

/// Nothing says in which file a tensor belongs that the opened checkpoint lacks.
#[test]
fn a_model_does_not_fit_a_checkpoint_that_lacks_a_tensor() {
    let folder = Family::Llama.checkpoint("lacking");
    let mut tensors = read_tensors(Family::Llama.weights());
    tensors.remove("model.layers.1.mlp.up_proj.weight");
    write_tensors(&folder.join(TENSORS), &tensors);
    let before = contents(&folder);
    let checkpoint = HuggingFace::open(&folder).unwrap();
    let model = checkpoint.config().init(&Device::flex());
    let error = checkpoint.save(&model, &folder).unwrap_err().to_string();
    assert_eq!(
        error.replace(&folder.display().to_string(), "DIR"),
        "DIR: the checkpoint has no \"model.layers.1.mlp.up_proj.weight\", which is the model's blocks.1.mlp.up.weight; \
         give all of its files, and its configuration"
    );
    assert!(contents(&folder) == before);
    checkpoint.with_shard_size(1 << 30).save(&model, &folder).unwrap();
    let loaded = HuggingFace::open(&folder).unwrap().load(&Device::flex()).unwrap();
    assert_eq!(parameters_by_path(&loaded), parameters_by_path(&model));

    let mut tensors = read_tensors(Family::Llama.weights());
    tensors.get_mut("model.norm.weight").unwrap().0 = Dtype::I32;
    write_tensors(&folder.join(TENSORS), &tensors);
    let checkpoint = HuggingFace::open(&folder).unwrap();
    let error = checkpoint.save(&model, &folder).unwrap_err().to_string();
    assert_eq!(
        error.replace(&folder.display().to_string(), "DIR"),
        "DIR: \"model.norm.weight\" is of I32; a checkpoint can have F64, F32, F16 and BF16"
    );
    checkpoint.with_dtype(DType::F16).save(&model, &folder).unwrap();
}
