//! The llama and gpt2 fixtures as folders, as `save_pretrained` writes them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use crate::folder;

pub const TENSORS: &str = "model.safetensors";
pub const INDEX: &str = "model.safetensors.index.json";
pub const CONFIG: &str = "config.json";

/// Whose checkpoint it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Family {
    Llama,
    Gpt2,
}

pub const FAMILIES: [Family; 2] = [Family::Llama, Family::Gpt2];

/// Tensors by name.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

impl Family {
    /// What the fixture says of itself.
    pub fn facts(self) -> Value {
        let text = match self {
            Self::Llama => include_str!("../../fixtures/llama/llama.json"),
            Self::Gpt2 => include_str!("../../fixtures/gpt2/gpt2.json"),
        };
        serde_json::from_str(text).unwrap()
    }

    /// `model.safetensors` as Python wrote it.
    pub fn weights(self) -> &'static [u8] {
        match self {
            Self::Llama => include_bytes!("../../fixtures/llama/llama.weights.safetensors"),
            Self::Gpt2 => include_bytes!("../../fixtures/gpt2/gpt2.weights.safetensors"),
        }
    }

    /// `config.json` of the library's model, and keys that nothing here knows.
    pub fn settings(self) -> Value {
        let mut settings = self.facts()["hf_config"].clone();
        settings["dtype"] = json!("float32");
        settings["eos_token_id"] = json!([0, 5]);
        settings["of_a_later_version"] = json!({ "nested": [1, null, "Zürich"] });
        settings
    }

    /// A folder of a test's own with the checkpoint in one file.
    pub fn checkpoint(self, name: &str) -> PathBuf {
        let folder = folder(&format!("{self:?}-{name}"));
        write_json(&folder.join(CONFIG), &self.settings());
        fs::write(folder.join(TENSORS), self.weights()).unwrap();
        folder
    }

    /// Likewise with the tensors in three files, one after another.
    pub fn sharded_checkpoint(self, name: &str) -> PathBuf {
        let folder = self.checkpoint(name);
        fs::remove_file(folder.join(TENSORS)).unwrap();
        let tensors = read_tensors(self.weights());
        let mut places = BTreeMap::new();
        let mut shards = vec![Tensors::new(); 3];
        for (number, (tensor, data)) in tensors.into_iter().enumerate() {
            places.insert(tensor.clone(), shard(number % 3));
            shards[number % 3].insert(tensor, data);
        }
        for (number, tensors) in shards.iter().enumerate() {
            write_tensors(&folder.join(shard(number)), tensors);
        }
        write_json(
            &folder.join(INDEX),
            &json!({ "metadata": { "total_size": 1 }, "weight_map": places }),
        );
        folder
    }
}

pub fn shard(number: usize) -> String {
    format!("model-{:05}-of-00003.safetensors", number + 1)
}

pub fn read_tensors(file: &[u8]) -> Tensors {
    let file = SafeTensors::deserialize(file).unwrap();
    file.iter()
        .map(|(name, view)| {
            let data = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name.to_owned(), data)
        })
        .collect()
}

/// By the library that Python's is made of.
pub fn write_tensors(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    fs::write(path, safetensors::serialize(views, Some(about)).unwrap()).unwrap();
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub fn write_json(path: &Path, json: &Value) {
    fs::write(path, serde_json::to_vec(json).unwrap()).unwrap();
}

/// The files of a folder, by name, with their bytes.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect()
}
