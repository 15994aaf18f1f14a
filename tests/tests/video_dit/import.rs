//! Checkpoints by name.

use std::collections::HashMap;

use burn::tensor::{DType, Device};
use burn_sp_models::video_dit::{ImportError, Naming, VideoDit, VideoDitConfig};
use burn_sp_tests::{cast, parameters_by_path};
use safetensors::{SafeTensors, serialize, tensor::TensorView};

use super::fixtures::{WEIGHTS, wan};

fn weights() -> SafeTensors<'static> {
    SafeTensors::deserialize(WEIGHTS).expect("a safetensors file")
}

fn load(config: &VideoDitConfig, files: &[SafeTensors<'_>]) -> Result<VideoDit, ImportError> {
    config.init(&Device::flex()).load(files)
}

/// A file of some tensors under other names.
fn renamed(name: impl Fn(&str) -> Option<String>) -> Vec<u8> {
    let weights = weights();
    let tensors = weights.iter().filter_map(|(old, view)| Some((name(old)?, view)));
    serialize(tensors.collect::<HashMap<String, TensorView<'_>>>(), None).expect("views of a file")
}

/// The names of the fixtures, which are diffusers', as Wan has them.
fn wans_names() -> HashMap<String, String> {
    let model = wan().init(&Device::flex());
    let paths = parameters_by_path(&model).into_keys();
    let name = |naming: Naming, path: &str| naming.tensor(path).expect("a parameter");
    paths
        .map(|path| (name(Naming::Diffusers, &path), name(Naming::Wan, &path)))
        .collect()
}

#[test]
fn wans_own_names_load_too() {
    let names = wans_names();
    assert_eq!(names["condition_embedder.time_proj.bias"], "time_projection.1.bias");
    assert_eq!(names["blocks.1.norm2.weight"], "blocks.1.norm3.weight");
    assert_eq!(names["blocks.0.scale_shift_table"], "blocks.0.modulation");
    assert_eq!(names["scale_shift_table"], "head.modulation");
    assert_eq!(names["blocks.0.attn2.to_out.0.bias"], "blocks.0.cross_attn.o.bias");
    assert_eq!(names["blocks.0.ffn.net.2.weight"], "blocks.0.ffn.2.weight");
    let bytes = renamed(|name| Some(names[name].clone()));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let (found, expected) = (load(&wan(), &[file]).unwrap(), load(&wan(), &[weights()]).unwrap());
    assert_eq!(parameters_by_path(&found), parameters_by_path(&expected));
}

/// Each parameter is its tensor, weights of linear layers transposed.
#[test]
fn a_checkpoint_may_lie_in_several_files() {
    let half = |blocks: bool| renamed(move |name| (name.starts_with("blocks.") == blocks).then(|| name.to_owned()));
    let (one, other) = (half(true), half(false));
    let files = [&one, &other].map(|bytes| SafeTensors::deserialize(bytes).expect("a safetensors file"));
    let found = load(&wan(), &files).unwrap();
    let expected = load(&wan(), &[weights()]).unwrap();
    assert_eq!(parameters_by_path(&found), parameters_by_path(&expected));
    let error = load(&wan(), &files[1..]).unwrap_err().to_string();
    assert!(error.starts_with("the checkpoint has no \"blocks."), "{error}");
}

/// The model's dtype is kept.
#[test]
fn a_model_in_bf16_stays_so() {
    let model = cast(wan().init(&Device::flex()), DType::BF16)
        .load(&[weights()])
        .unwrap();
    let expected = cast(load(&wan(), &[weights()]).unwrap(), DType::BF16);
    assert_eq!(parameters_by_path(&model), parameters_by_path(&expected));
}

#[test]
fn what_is_no_checkpoint_of_the_model_is_refused() {
    let deeper = VideoDitConfig { layers: 3, ..wan() };
    let error = load(&deeper, &[weights()]).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "the checkpoint has no \"blocks.2.scale_shift_table\", which is the model's blocks.2.modulation"
        ),
        "{error}"
    );
    let error = load(&VideoDitConfig { layers: 1, ..wan() }, &[weights()]).unwrap_err();
    assert!(
        matches!(&error, ImportError::Unused(name) if name.starts_with("blocks.1.")),
        "{error}"
    );
    let wider = VideoDitConfig { text_dim: 33, ..wan() };
    let error = load(&wider, &[weights()]).unwrap_err();
    let expected = ImportError::Shape {
        name: "condition_embedder.text_embedder.linear_1.weight".into(),
        path: "text.first.weight".into(),
        found: vec![64, 32],
        expected: vec![64, 33],
    };
    assert_eq!(error, expected);
    let bytes = renamed(|name| Some(format!("model.{name}")));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let error = load(&wan(), &[file]).unwrap_err();
    assert!(matches!(error, ImportError::Naming(..)), "{error}");
}
