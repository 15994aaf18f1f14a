//! Checkpoints of Llama and GPT-2 as Hugging Face's transformers writes and reads them.

mod config;
mod draft;
mod files;
mod names;
mod save;
mod settings;

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device};
use serde_json::{Map, Value};

use super::{Transformer, TransformerConfig};
use crate::import::{ImportError, find, load_placed, to_file_dtype};
use draft::{CONFIG, Draft};
use files::{Files, Maps};
use names::{Family, HEAD};
use settings::Settings;

/// A checkpoint of Llama or GPT-2: a folder with `config.json` and `model.safetensors`, or several such files and
/// `model.safetensors.index.json`, as `save_pretrained` of transformers writes it and `from_pretrained` reads it.
///
/// What is computed otherwise than here is refused when it is opened, by the key of `config.json`: other activations,
/// other scalings of rotary positions than `linear` and `llama3`, biases in some linear layers only. Names may begin with
/// `model.` (Llama) or `transformer.` (GPT-2), or not.
///
/// The files are mapped into memory while they are opened or loaded, and read one tensor at a time; they must not change
/// meanwhile. Between, they may: what is loaded is what the folder has then.
///
/// # Example
/// ```
/// use burn::tensor::Device;
/// use burn_sp_models::transformer::{HuggingFace, TransformerConfig};
///
/// let folder = std::env::temp_dir().join(format!("llama-{}", std::process::id()));
/// let config = TransformerConfig::llama(16, 8, 1, 2, 12);
/// HuggingFace::new(&config)?.save(&config.init(&Device::flex()), &folder)?;
///
/// let checkpoint = HuggingFace::open(&folder)?;
/// assert_eq!(checkpoint.config().hidden_size, 8);
/// let model = checkpoint.load(&Device::flex().autodiff())?;
/// // Train it, on any mesh; then:
/// checkpoint.save(&model, &folder)?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), burn_sp_models::transformer::ImportError>(())
/// ```
#[derive(Debug)]
pub struct HuggingFace {
    family: Family,
    config: TransformerConfig,
    /// All of `config.json`.
    settings: Map<String, Value>,
    /// Of a checkpoint that was opened.
    files: Option<Files>,
    dtype: Option<DType>,
    shard_size: Option<u64>,
    tokenizer: Option<PathBuf>,
}

impl HuggingFace {
    /// Opens a checkpoint, reading its configuration and the names of its tensors. If a process ended while it
    /// [saved](Self::save) to that folder, there is a whole checkpoint all the same, the new one or the one before.
    ///
    /// # Errors
    /// If a file is missing, cut or none of its kind, or the configuration is of a model that would be computed otherwise.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, ImportError> {
        let folder = folder.as_ref();
        let path = draft::readable(folder).join(CONFIG);
        let text = fs::read(&path).map_err(|error| ImportError::file(&path, error))?;
        let settings = serde_json::from_slice(&text).map_err(|error| ImportError::file(&path, error))?;
        let (family, config) = config::read(&Settings::new(&path, &settings))?;
        Ok(Self {
            family,
            config,
            settings,
            files: Some(Files::open(folder)?),
            dtype: None,
            shard_size: None,
            tokenizer: None,
        })
    }

    /// For a model that was none of transformers' so far. What `config.json` will not say, as nothing here depends on it, is
    /// for [`with_setting`](Self::with_setting): which tokens begin and end a text, and how many positions a Llama was
    /// trained on (`max_position_embeddings`, for which transformers takes 2048).
    ///
    /// # Errors
    /// If the configuration is neither of Llama's shape nor of GPT-2's.
    pub fn new(config: &TransformerConfig) -> Result<Self, ImportError> {
        let (family, settings) = config::write(config)?;
        Ok(Self {
            family,
            config: config.clone(),
            settings,
            files: None,
            dtype: None,
            shard_size: None,
            tokenizer: None,
        })
    }

    /// Saves in this dtype, instead of those of the tensors that were opened, or of a new model's parameters.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self {
            dtype: Some(dtype),
            ..self
        }
    }

    /// Saves in files of at most so many bytes of tensors (a larger tensor has one of its own), instead of those that
    /// each tensor was in when it was opened, or of 5 GB.
    pub fn with_shard_size(self, bytes: u64) -> Self {
        Self {
            shard_size: Some(bytes),
            ..self
        }
    }

    /// Saves this key of `config.json` along with the model: one that means nothing here, such as `eos_token_id` or
    /// `max_position_embeddings`.
    ///
    /// # Errors
    /// If the key says what the model or its tensors are: that is for the model's configuration, and for
    /// [`with_dtype`](Self::with_dtype), to say.
    ///
    /// # Example
    /// ```
    /// use burn_sp_models::transformer::{HuggingFace, TransformerConfig};
    ///
    /// let new = HuggingFace::new(&TransformerConfig::llama(16, 8, 1, 2, 12))?;
    /// let new = new.with_setting("max_position_embeddings", 8192)?.with_setting("eos_token_id", 2)?;
    /// assert!(new.with_setting("hidden_size", 16).is_err());
    /// # Ok::<(), burn_sp_models::transformer::ImportError>(())
    /// ```
    pub fn with_setting(self, key: &str, value: impl Into<Value>) -> Result<Self, ImportError> {
        let mut settings = self.settings.clone();
        settings.insert(key.to_owned(), value.into());
        let path = self.config_path();
        let [before, after] = [&self.settings, &settings].map(|values| Settings::new(&path, values));
        match config::is_free(key, &before, &after)? {
            true => Ok(Self { settings, ..self }),
            false => Err(after.refuse(key, "the model itself decides that, by its configuration and its dtype")),
        }
    }

    /// Saves this `tokenizer.json` along with the model, instead of one that lay beside it.
    pub fn with_tokenizer(self, file: impl Into<PathBuf>) -> Self {
        Self {
            tokenizer: Some(file.into()),
            ..self
        }
    }

    /// Whether [`save`](Self::save) may write to this folder, to know it before a long run: there is nothing, or a
    /// checkpoint and nothing else.
    ///
    /// # Errors
    /// As those of [`save`](Self::save) about the folder.
    pub fn check_folder(folder: impl AsRef<Path>) -> Result<(), ImportError> {
        draft::check(folder.as_ref())
    }

    /// The model's configuration.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The model with the checkpoint's weights, in f32.
    ///
    /// # Errors
    /// As [`load_as`](Self::load_as).
    pub fn load(&self, device: &Device) -> Result<Transformer, ImportError> {
        self.load_as(DType::F32, device)
    }

    /// The model with the checkpoint's weights, in a float dtype.
    ///
    /// # Errors
    /// If a parameter is missing, of another shape or dtype, or the files have a tensor that is no parameter; or if the
    /// checkpoint was not opened, but is [`new`](Self::new).
    pub fn load_as(&self, dtype: DType, device: &Device) -> Result<Transformer, ImportError> {
        if to_file_dtype(dtype).is_none() {
            let why = format!("a model of {} cannot be made; take F64, F32, F16 or BF16", dtype.name());
            return Err(ImportError::Config(why));
        }
        let Some(files) = &self.files else {
            let why = "a new checkpoint has no weights; make the model with its configuration's `init`";
            return Err(ImportError::Config(why.into()));
        };
        let maps = Maps::open(&files.place)?;
        let (tensors, prefix) = (maps.read()?, self.prefix());
        let embedding = find(&tensors, &format!("{prefix}{}", self.family.embedding()));
        let tied = self.config.tie_embeddings;
        let wrong = match (tied, find(&tensors, HEAD)) {
            (true, Some(head)) if embedding.is_some_and(|embedding| head != embedding) => {
                Some("is not the token embedding; with false both are read")
            }
            (false, None) => Some("is missing; with true it is the token embedding"),
            _ => None,
        };
        if let Some(wrong) = wrong {
            let path = self.config_path();
            let settings = Settings::new(&path, &self.settings);
            return Err(settings.refuse("tie_word_embeddings", format!("but {HEAD:?} {wrong}")));
        }
        let model = load_placed(
            self.config.undrawn(device),
            &tensors,
            |path, _| self.family.place(prefix, path),
            |name| Family::is_buffer(name) || (tied && name == HEAD),
            Some(dtype),
        );
        model.map_err(|error| error.of(&maps.folder))
    }

    /// Saves a model of this configuration in a folder, as transformers would: the same names, shapes and order of tensors,
    /// and `config.json` with all that it had when it was opened. What was loaded, in a dtype that holds what the files
    /// have, and not trained gives the same bytes, except that buffers of older checkpoints (`h.0.attn.bias`, `inv_freq`) are
    /// left out, the counts in the index are made anew, and several keys of a file's `__metadata__` come in any order.
    /// Tensors keep the dtypes that they had when they were opened, whatever that of the model, unless
    /// [`with_dtype`](Self::with_dtype) says another. Of the opened folder, or else of one that is replaced, the files of the
    /// tokenizer and of generation go along.
    ///
    /// The model must be whole; see [`whole_module`](burn_sp::train::whole_module) for one of which ranks hold parts.
    /// Parameters are brought from the device, cast and written one at a time. Not collective: ranks that go on wait for the
    /// one that saves at their next collective, no longer than the timeout of [`LaunchConfig`](burn_sp::LaunchConfig).
    ///
    /// The folder appears whole or not at all: it is written as `.NAME.tmp` beside and renamed when all of it is on the
    /// disk. A checkpoint that was there is `.NAME.old` meanwhile; if the process ends just between the two renames,
    /// [`open`](Self::open) reads that, and the next save puts it back. One process at a time may save to a folder. A folder
    /// with anything but a checkpoint in it is not replaced.
    ///
    /// # Errors
    /// If the model is not whole or of another configuration, a dtype is none of F64, F32, F16 and BF16, the opened
    /// checkpoint lacks a tensor (so that nothing says in which file it belongs; [`with_shard_size`](Self::with_shard_size)
    /// does), the folder has other files, or a file cannot be read or written.
    pub fn save(&self, model: &Transformer, folder: impl AsRef<Path>) -> Result<(), ImportError> {
        let tensors = save::collect(self, model)?;
        let draft = Draft::begin(folder.as_ref())?;
        let saved = save::write(self, tensors, &draft).and_then(|()| draft.publish());
        if saved.is_err() {
            draft.discard();
        }
        saved
    }

    /// Those that were opened, if each tensor is saved in the file that it was in.
    fn kept_files(&self) -> Option<&Files> {
        self.files.as_ref().filter(|_| self.shard_size.is_none())
    }

    /// Where the configuration stands, or will.
    fn config_path(&self) -> PathBuf {
        match &self.files {
            Some(files) => files.place.join(CONFIG),
            None => CONFIG.into(),
        }
    }

    /// What names in the checkpoint begin with.
    fn prefix(&self) -> &'static str {
        let has = |name: &str| {
            self.files
                .as_ref()
                .is_some_and(|files| files.tensors.contains_key(name))
        };
        match has(self.family.embedding()) {
            true => "",
            false => self.family.prefix(),
        }
    }
}
