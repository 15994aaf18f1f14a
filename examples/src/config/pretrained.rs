//! The flags of checkpoints in the form of Hugging Face.

use std::path::PathBuf;

use burn_sp_models::transformer::{HuggingFace, NormKind, TransformerConfig};

use super::{BYTES, check_folder, refuse};
use crate::InputError;
use crate::flags::{CheckpointFlags, DataFlags, ModelFlags, Shape};

/// A checkpoint to start from: where it is, and what model it is of.
pub(super) struct Pretrained {
    folder: PathBuf,
    pub transformer: TransformerConfig,
}

impl CheckpointFlags {
    /// Opens the checkpoint, and checks that the other can be written; the latter only where this process is the one that
    /// writes.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub(super) fn resolve(&self, silent: bool) -> Result<Option<Pretrained>, InputError> {
        if let Some(folder) = self.export.as_ref().filter(|_| !silent) {
            check_folder("--export", folder)?;
            HuggingFace::check_folder(folder).map_err(|error| InputError(format!("--export {error}")))?;
        }
        let Some(folder) = &self.pretrained else {
            return Ok(None);
        };
        let checkpoint = HuggingFace::open(folder).map_err(|error| InputError(format!("--pretrained {error}")))?;
        Ok(Some(Pretrained {
            folder: folder.clone(),
            transformer: checkpoint.config().clone(),
        }))
    }
}

impl Pretrained {
    /// The model's flags, completed by the checkpoint.
    ///
    /// # Errors
    /// If a flag says otherwise.
    pub fn complete(&self, flags: ModelFlags) -> Result<ModelFlags, InputError> {
        let own = &self.transformer;
        let shape = match own.norm {
            NormKind::Rms => Shape::Llama,
            NormKind::Layer => Shape::Gpt2,
        };
        if flags.shape.is_some_and(|given| given != shape) {
            return refuse("--shape: the model of --pretrained has another; leave it out");
        }
        let sizes = [
            ("--hidden", flags.hidden, own.hidden_size),
            ("--layers", flags.layers, own.layers),
            ("--heads", flags.heads, own.heads),
            ("--kv-heads", flags.kv_heads, own.kv_heads),
            ("--ffn", flags.ffn, own.ffn_size),
        ];
        for (flag, given, own) in sizes {
            if let Some(given) = given.filter(|given| *given != own) {
                return refuse(format!(
                    "{flag} {given}: the model of --pretrained has {own}; leave it out"
                ));
            }
        }
        Ok(ModelFlags {
            shape: Some(shape),
            hidden: Some(own.hidden_size),
            layers: Some(own.layers),
            heads: Some(own.heads),
            kv_heads: Some(own.kv_heads),
            ffn: Some(own.ffn_size),
            window: flags.window,
            dropout: flags.dropout.or(Some(own.dropout)),
            attention_dropout: flags.attention_dropout.or(Some(own.attention_dropout)),
        })
    }

    /// The data's flags, with the checkpoint's tokenizer if they name none.
    pub fn with_tokenizer(&self, flags: &DataFlags) -> DataFlags {
        let file = self.folder.join("tokenizer.json");
        let own = flags.tokenizer.is_none() && flags.tokens.is_none() && file.is_file();
        DataFlags {
            tokenizer: if own { Some(file) } else { flags.tokenizer.clone() },
            ..flags.clone()
        }
    }

    /// The entries of the model's vocabulary, those of the data being so many.
    ///
    /// # Errors
    /// If the data have others.
    pub fn vocabulary(&self, data: usize, bytes: bool) -> Result<usize, InputError> {
        let (own, folder) = (self.transformer.vocab_size, self.folder.display());
        match (data, bytes) {
            (data, false) if data > own => refuse(format!(
                "--tokenizer, --tokens: they have a vocabulary of {data}, and the model in {folder} one of {own}; give the \
                 tokenizer that it was trained with"
            )),
            (_, true) if own != BYTES => refuse(format!(
                "--pretrained {folder}: it has no tokenizer.json, and its vocabulary of {own} is not that of bytes; give \
                 --tokenizer"
            )),
            _ => Ok(own),
        }
    }
}
