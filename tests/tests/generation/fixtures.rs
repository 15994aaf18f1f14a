//! PyTorch's logits of Hugging Face checkpoints, token by token through a cache.

use std::fs;
use std::path::Path;

use burn::tensor::DType;
use burn_sp::attention::Mask;
use burn_sp::layout::MeshShape;
use burn_sp_models::transformer::{HuggingFace, Transformer};
use burn_sp_tests::Fixture;
use serde_json::Value;

use super::tiny::{self, plan};
use crate::common::{device, mesh, near};

struct Family {
    name: &'static str,
    facts: &'static str,
    weights: &'static [u8],
    data: &'static [u8],
}

macro_rules! family {
    ($name:literal) => {
        Family {
            name: $name,
            facts: include_str!(concat!("../../fixtures/", $name, "/", $name, ".json")),
            weights: include_bytes!(concat!("../../fixtures/", $name, "/", $name, ".weights.safetensors")),
            data: include_bytes!(concat!("../../fixtures/", $name, "/", $name, ".data.safetensors")),
        }
    };
}

impl Family {
    fn facts(&self) -> Value {
        serde_json::from_str(self.facts).expect("valid JSON")
    }

    fn load(&self, dtype: DType) -> Transformer {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join("generation")
            .join(format!("{}-{dtype:?}", self.name));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.json"), self.facts()["hf_config"].to_string()).unwrap();
        fs::write(folder.join("model.safetensors"), self.weights).unwrap();
        let checkpoint = HuggingFace::open(&folder).unwrap_or_else(|error| panic!("{error}"));
        checkpoint
            .load_as(dtype, &device())
            .unwrap_or_else(|error| panic!("{error}"))
    }
}

fn logits_are_pytorchs(family: &Family) {
    let (facts, data) = (family.facts(), Fixture::new(family.data));
    let expected = data.f64s("logits_f64");
    let suggested = facts["tolerances"]["logits"]["suggested_atol"]
        .as_f64()
        .expect("a number");
    for (dtype, atol) in [(DType::F32, suggested), (DType::F64, 1e-12)] {
        let model = family.load(dtype);
        for mesh in [
            MeshShape::default(),
            mesh(1, 1, 4),
            mesh(1, 4, 1),
            mesh(1, 2, 2),
            mesh(2, 1, 2),
            MeshShape::tp(2),
            MeshShape::tp(2).with_ulysses(2),
        ] {
            for plan in [plan(1, 31), plan(13, 19)] {
                let found = tiny::ranks(mesh, &model, |device, model| {
                    let tokens = data.int("input_ids", device.device());
                    tiny::through_cache(&model, &tokens, &plan, &Mask::Causal, &device).0
                });
                let what = format!("{} in {dtype:?}, {} tokens first, {mesh}", family.name, plan[0].0);
                near(&found[0], &expected, atol, &what);
            }
        }
    }
}

#[test]
fn llama_token_by_token_is_pytorchs() {
    logits_are_pytorchs(&family!("llama"));
}

#[test]
fn gpt2_token_by_token_is_pytorchs() {
    logits_are_pytorchs(&family!("gpt2"));
}
