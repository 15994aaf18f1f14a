use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use burn_sp::attention::Mask;
use burn_sp::train::SavedState;
use burn_sp_models::transformer::{HuggingFace, PositionKind, Transformer, TransformerConfig};
use serde_json::Value;

use crate::InputError;
use crate::config::{BYTES, TrainConfig, refuse};

/// The weight whose rows are the entries of the vocabulary.
const EMBEDDING: &str = "embedding.weight";

/// A model in a folder, opened before any rank starts.
#[derive(Debug)]
pub struct Source {
    kind: Kind,
    config: TransformerConfig,
    mask: Mask,
    /// Where the tokenizer is, if it has one.
    pub(super) tokenizer: Option<PathBuf>,
    /// Whether its tokens are bytes, if it has no tokenizer.
    pub(super) bytes: bool,
    /// What ends a text, by name in the tokenizer or by id.
    pub(super) end: Vec<Value>,
}

#[derive(Debug)]
enum Kind {
    /// `train-transformer --save` wrote it.
    Trained(Box<SavedState>),
    HuggingFace(Box<HuggingFace>),
}

impl Source {
    /// A Hugging Face checkpoint if there is a `config.json`, else the newest training state in the folder, or the one whose
    /// folder it is.
    ///
    /// # Errors
    /// If it is neither, is damaged, or is that of another program.
    pub fn open(folder: &Path) -> Result<Self, InputError> {
        match folder.join("config.json").is_file() {
            true => Self::hugging_face(folder),
            false => Self::trained(folder),
        }
    }

    fn hugging_face(folder: &Path) -> Result<Self, InputError> {
        let checkpoint = HuggingFace::open(folder).map_err(|error| InputError(format!("--from {error}")))?;
        let tokenizer = folder.join("tokenizer.json");
        Ok(Self {
            config: checkpoint.config().clone(),
            mask: Mask::Causal,
            tokenizer: tokenizer.is_file().then_some(tokenizer),
            bytes: checkpoint.config().vocab_size == BYTES,
            end: ends_of(folder)?,
            kind: Kind::HuggingFace(Box::new(checkpoint)),
        })
    }

    fn trained(folder: &Path) -> Result<Self, InputError> {
        let state = SavedState::open(folder).map_err(|error| InputError(format!("--from {error}")))?;
        let (shown, config) = (state.folder().display(), &state.info().config);
        let program = config["program"].as_str().unwrap_or("another program");
        if program != "train-transformer" {
            return refuse(format!(
                "--from {shown}: {program} saved it; give a state of train-transformer, or a Hugging Face folder"
            ));
        }
        let trained: Result<TrainConfig, _> = serde_json::from_value(config.clone());
        // Of a model that was not made of flags, but loaded.
        let own = config.get("transformer").map(|own| serde_json::from_value(own.clone()));
        let (Ok(mut trained), Ok(own), Some(&[vocabulary, _])) = (trained, own.transpose(), state.shape(EMBEDDING))
        else {
            return refuse(format!(
                "--from {shown}: its configuration is none that this version reads; use the version that saved it"
            ));
        };
        (trained.vocabulary, trained.transformer) = (vocabulary, own);
        Ok(Self {
            config: trained.model(),
            mask: trained.mask(),
            bytes: trained.data.is_bytes(),
            tokenizer: trained.data.tokenizer,
            end: trained.data.eos.into_iter().map(Value::from).collect(),
            kind: Kind::Trained(Box::new(state)),
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Who saw whom in training.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// Whether a prompt gets the tokens around it that its tokenizer has for that: a checkpoint of others was trained so.
    pub(super) fn begins_specially(&self) -> bool {
        matches!(self.kind, Kind::HuggingFace(_))
    }

    /// How many positions the model knows, where they are learned.
    pub fn positions(&self) -> Option<usize> {
        match self.config.positions {
            PositionKind::Learned { max } => Some(max),
            PositionKind::Rotary { .. } => None,
        }
    }

    /// The model with its weights, in f32, in host memory.
    ///
    /// # Errors
    /// If they are not those of the configuration, or cannot be read.
    pub fn load(self) -> Result<Transformer, InputError> {
        let device = Device::flex();
        let wrong = |error: &dyn std::fmt::Display| InputError(format!("--from {error}"));
        match self.kind {
            Kind::HuggingFace(checkpoint) => checkpoint.load(&device).map_err(|error| wrong(&error)),
            Kind::Trained(mut state) => {
                let model = self.config.init(&device);
                state.load_module(model).map_err(|error| wrong(&error))
            }
        }
    }
}

/// The tokens that end a text: those of `generation_config.json` if it names any, else of `config.json`.
fn ends_of(folder: &Path) -> Result<Vec<Value>, InputError> {
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        if !path.is_file() {
            continue;
        }
        let wrong = |error: &dyn std::fmt::Display| InputError(format!("--from {}: {error}", path.display()));
        let file = File::open(&path).map_err(|error| wrong(&error))?;
        let settings: Value = serde_json::from_reader(BufReader::new(file)).map_err(|error| wrong(&error))?;
        match &settings["eos_token_id"] {
            Value::Null => {}
            Value::Array(ends) => return Ok(ends.clone()),
            end => return Ok(vec![end.clone()]),
        }
    }
    Ok(Vec::new())
}
