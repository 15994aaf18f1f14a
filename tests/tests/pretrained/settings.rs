//! What a checkpoint says beside its model: keys of `config.json`, of the index and of the files themselves.

use std::collections::HashMap;
use std::fs;

use burn::tensor::{DType, Device};
use burn_sp_models::transformer::{HuggingFace, TransformerConfig};
use safetensors::{SafeTensors, serialize, tensor::TensorView};
use serde_json::{Value, json};

use super::checkpoint::{CONFIG, Family, INDEX, TENSORS, contents, read_json, read_tensors, write_json};
use crate::folder;

#[test]
fn keys_that_mean_nothing_here_are_set() {
    let config = TransformerConfig::llama(16, 8, 1, 2, 12);
    let model = config.init(&Device::flex());
    let folder = folder("settings");
    let new = HuggingFace::new(&config).unwrap();
    let plain = folder.join("plain");
    new.save(&model, &plain).unwrap();
    let mut expected = read_json(&plain.join(CONFIG));
    assert_eq!(expected["eos_token_id"], Value::Null);
    let set = HuggingFace::new(&config)
        .unwrap()
        .with_setting("eos_token_id", vec![2, 7])
        .and_then(|new| new.with_setting("max_position_embeddings", 8192))
        // Says what it says already.
        .and_then(|new| new.with_setting("hidden_size", 8))
        .and_then(|new| new.with_setting("num_key_value_heads", Value::Null))
        .unwrap();
    set.save(&model, folder.join("set")).unwrap();
    expected["eos_token_id"] = json!([2, 7]);
    expected["max_position_embeddings"] = json!(8192);
    expected["num_key_value_heads"] = Value::Null;
    assert_eq!(read_json(&folder.join("set").join(CONFIG)), expected);
    assert_eq!(HuggingFace::open(folder.join("set")).unwrap().config(), &config);
}

#[test]
fn keys_of_the_model_are_not_set() {
    let folder = Family::Gpt2.checkpoint("not-set");
    for (key, value, why) in [
        ("n_embd", json!(32), None),
        ("resid_pdrop", json!(0.5), Some("embd_pdrop is 0.0")),
        ("tie_word_embeddings", json!(false), None),
        ("initializer_range", json!(0.5), None),
        ("architectures", json!(["GPT2Model"]), None),
        ("torch_dtype", json!("float16"), None),
        ("dtype", json!("float16"), None),
        (
            "activation_function",
            json!("relu"),
            Some("activation_function is \"relu\""),
        ),
        (
            "model_type",
            json!("bert"),
            Some("what can be read is \"llama\" or \"gpt2\""),
        ),
        ("n_head", json!(0), Some("n_head is 0")),
    ] {
        let refused = HuggingFace::open(&folder)
            .unwrap()
            .with_setting(key, value.clone())
            .unwrap_err();
        let (path, refused) = (folder.join(CONFIG), refused.to_string());
        match why {
            None => assert_eq!(
                refused,
                format!(
                    "{}: {key} is {value}; the model itself decides that, by its configuration and its dtype",
                    path.display()
                )
            ),
            Some(why) => assert!(refused.contains(why), "{refused}"),
        }
    }
}

/// A file of the fixture that says more of itself.
fn file(about: &[(&str, &str)]) -> Vec<u8> {
    let tensors = read_tensors(Family::Gpt2.weights());
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let about = about.iter().map(|(key, value)| (key.to_string(), value.to_string()));
    let about: HashMap<String, String> = about.collect();
    serialize(views, (!about.is_empty()).then_some(about)).unwrap()
}

#[test]
fn what_files_say_of_themselves_stays() {
    let place = Family::Gpt2.checkpoint("about");
    for about in [&[][..], &[("producer", "someone")], &[("format", "pt")]] {
        let bytes = file(about);
        fs::write(place.join(TENSORS), &bytes).unwrap();
        let checkpoint = HuggingFace::open(&place).unwrap();
        let model = checkpoint.load(&Device::flex()).unwrap();
        let to = folder("about");
        checkpoint.save(&model, &to).unwrap();
        assert!(contents(&to)[TENSORS] == bytes, "{about:?}");
    }
    // In any order.
    let several = file(&[("format", "pt"), ("producer", "someone"), ("step", "7")]);
    fs::write(place.join(TENSORS), &several).unwrap();
    let checkpoint = HuggingFace::open(&place).unwrap();
    let model = checkpoint.load(&Device::flex()).unwrap();
    checkpoint.save(&model, &place).unwrap();
    let saved = fs::read(place.join(TENSORS)).unwrap();
    let about = |bytes: &[u8]| SafeTensors::read_metadata(bytes).unwrap().1.metadata().clone();
    assert_eq!(about(&saved), about(&several));
    assert!(read_tensors(&saved) == read_tensors(&several));

    let sharded = Family::Gpt2.sharded_checkpoint("about-index");
    let mut index = read_json(&sharded.join(INDEX));
    index["metadata"]["producer"] = json!("someone");
    write_json(&sharded.join(INDEX), &index);
    let checkpoint = HuggingFace::open(&sharded).unwrap();
    checkpoint.with_dtype(DType::F16).save(&model, &sharded).unwrap();
    let parameters = burn::module::Module::num_params(&model);
    assert_eq!(
        read_json(&sharded.join(INDEX))["metadata"],
        json!({ "producer": "someone", "total_parameters": parameters, "total_size": 2 * parameters })
    );
}
