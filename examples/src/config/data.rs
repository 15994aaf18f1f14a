//! The flags of a language model's data.

use std::path::{Path, PathBuf};

use burn_sp::data::TokenFile;
use serde::{Deserialize, Serialize};

use super::{BYTES, refuse};
use crate::InputError;
use crate::flags::DataFlags;
use crate::tokens::{eos_of, load_tokenizer, vocabulary};

/// What tokens are, and where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // They are documented where they are flags.
pub struct DataConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document_separator: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub pack: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl DataFlags {
    /// Checks the flags, all but the text and the tokens themselves, and counts the entries of the vocabulary.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self, text: Option<&[PathBuf]>) -> Result<(DataConfig, usize), InputError> {
        let config = DataConfig {
            tokenizer: self.tokenizer.clone(),
            tokens: self.tokens.clone(),
            document_separator: self.document_separator.clone(),
            eos: self.eos.clone(),
            held_out: self.held_out.clone(),
            pack: self.pack.unwrap_or(false),
        };
        let needs = |flags: [(&str, bool); 2], others: &str| match flags.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => refuse(format!("{flag}: give {others} too, or leave it out")),
            None => Ok(()),
        };
        if config.is_bytes() {
            needs(
                [("--pack", config.pack), ("--held-out", config.held_out.is_some())],
                "--tokenizer or --tokens",
            )?;
        }
        let vocabulary = match &config.tokenizer {
            Some(path) => {
                let tokenizer = load_tokenizer(path)?;
                if let Some(eos) = &config.eos {
                    eos_of(&tokenizer, eos)?;
                }
                let (file, entries) = (config.file(text)?, vocabulary(&tokenizer));
                if text.is_none() {
                    check_kept(&file, path, entries)?;
                }
                entries
            }
            None => {
                needs(
                    [
                        ("--document-separator", config.document_separator.is_some()),
                        ("--eos", config.eos.is_some()),
                    ],
                    "--tokenizer",
                )?;
                match &config.tokens {
                    Some(_) if text.is_some() => {
                        return refuse(
                            "--text: --tokens alone trains on a file of tokens; give --tokenizer to make it",
                        );
                    }
                    Some(file) => opened(file)?.vocabulary(),
                    None => BYTES,
                }
            }
        };
        if config.document_separator.as_deref() == Some("") {
            return refuse("--document-separator: it is empty; leave it out for a document a file");
        }
        Ok((config, vocabulary))
    }
}

impl DataConfig {
    /// Whether a byte is a token.
    pub fn is_bytes(&self) -> bool {
        self.tokenizer.is_none() && self.tokens.is_none()
    }

    /// Where the tokens are, or go: beside the text, if no flag says so.
    ///
    /// # Errors
    /// If there is no such place.
    pub(crate) fn file(&self, text: Option<&[PathBuf]>) -> Result<PathBuf, InputError> {
        if let Some(file) = &self.tokens {
            return match file.is_dir() {
                true => refuse(format!(
                    "--tokens {}: that is a folder; name a file in it",
                    file.display()
                )),
                false => Ok(file.clone()),
            };
        }
        if text.is_none() {
            return refuse("--tokenizer: give --text, files to tokenize, or --tokens, a file of tokens");
        }
        let first = text.and_then(|paths| paths.first());
        let name = first.and_then(|path| Some((path, path.file_name()?)));
        let Some((path, name)) = name else {
            return refuse("--tokenizer: give --tokens, a file for the tokens, too");
        };
        let mut name = name.to_os_string();
        name.push(".tokens");
        Ok(Path::new(path).with_file_name(name))
    }
}

/// Tokens whose text is not given may be of another tokenizer.
fn check_kept(file: &Path, tokenizer: &Path, entries: usize) -> Result<(), InputError> {
    if !file.exists() {
        return refuse(format!(
            "--tokens {}: it is not there; give --text to make it of",
            file.display()
        ));
    }
    let found = opened(file)?;
    if found.vocabulary() < entries {
        return refuse(format!(
            "--tokens {} has a vocabulary of {}, and --tokenizer {} one of {entries}; give the tokenizer that it was made \
             with, or leave it out",
            file.display(),
            found.vocabulary(),
            tokenizer.display()
        ));
    }
    Ok(())
}

fn opened(file: &Path) -> Result<TokenFile, InputError> {
    TokenFile::open(file).map_err(|error| InputError(format!("--tokens {error}")))
}
