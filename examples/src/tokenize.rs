//! Text turned into a file of tokens, once: a file that is there is used, or refused, and never written over.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn_sp::data::{TokenError, TokenFile, TokenWriter};
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use crate::InputError;
use crate::config::{DataConfig, refuse};
use crate::corpus::{Corpus, Piece};
use crate::fnv::Fnv;
use crate::listing::Listing;
use crate::progress::Progress;
use crate::tokens::{eos_of, load_tokenizer, vocabulary};

/// Text is tokenized in batches of so many bytes, whose pieces share out the cores.
const BATCH: usize = 4 << 20;

/// What tokens were made of, as their file says.
#[derive(Serialize, Deserialize)]
struct About {
    /// All of the text.
    text: String,
    /// Its files, by which it is known again without being read.
    files: String,
    tokenizer: String,
    document_separator: Option<String>,
    eos: Option<String>,
}

impl About {
    /// What a file says, if it was made here.
    fn of(file: &TokenFile) -> Option<Self> {
        serde_json::from_str(file.about()).ok()
    }
}

/// How text becomes tokens.
pub(crate) struct Tokenizing<'a> {
    data: &'a DataConfig,
    tokenizer: &'a Path,
    /// A hash of the tokenizer.
    hash: String,
    /// The files of the run, of tokens to train on and of those held out: no part of a text.
    made: &'a [PathBuf; 2],
    progress: &'a Progress,
}

impl<'a> Tokenizing<'a> {
    /// By this tokenizer, into these files, of tokens to train on and of those held out.
    ///
    /// # Errors
    /// If the tokenizer's file cannot be read.
    pub fn new(
        data: &'a DataConfig,
        tokenizer: &'a Path,
        made: &'a [PathBuf; 2],
        progress: &'a Progress,
    ) -> Result<Self, InputError> {
        let bytes = fs::read(tokenizer);
        let bytes = bytes.map_err(|error| InputError(format!("--tokenizer {}: {error}", tokenizer.display())))?;
        Ok(Self {
            data,
            tokenizer,
            hash: Fnv::new().bytes(&bytes).hex(),
            made,
            progress,
        })
    }

    /// The tokens of a file that is there, whatever its text was.
    ///
    /// # Errors
    /// If it cannot be read, or was made by another tokenizer or otherwise than flags say.
    pub fn kept(&self, file: &Path) -> Result<TokenFile, InputError> {
        let kept = TokenFile::open(file).map_err(wrong)?;
        match About::of(&kept).and_then(|about| self.difference(&about, false)) {
            Some(how) => other(file, &how),
            None => Ok(kept),
        }
    }

    /// The tokens of a text, from the file, which is made if it is not there. Of several processes the first makes it.
    ///
    /// # Errors
    /// If they cannot be made, or the file holds others.
    pub fn of(&self, text: &[PathBuf], file: &Path) -> Result<TokenFile, InputError> {
        let listing = Listing::of(Some(text))?.without(self.made);
        let files = listing.digest()?;
        if let Some(ready) = self.ready(&listing, &files, file)? {
            return Ok(ready);
        }
        // Held until the file is there.
        let path = lock_of(file);
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.and_then(|file| file.lock().map(|()| file));
        let _lock =
            lock.map_err(|error| InputError(format!("--tokens: {} cannot be locked: {error}", path.display())))?;
        match self.ready(&listing, &files, file)? {
            Some(ready) => Ok(ready),
            None => self.make(&listing, files, file),
        }
    }

    /// The file, if it is there.
    fn ready(&self, listing: &Listing, files: &str, file: &Path) -> Result<Option<TokenFile>, InputError> {
        let there = file.try_exists();
        if !there.map_err(|error| InputError(format!("--tokens {}: {error}", file.display())))? {
            return Ok(None);
        }
        let found = match TokenFile::open(file) {
            Ok(found) => found,
            Err(error @ TokenError::Foreign { .. }) => {
                return refuse(format!("--tokens {error}, or a file that is not there"));
            }
            Err(error @ (TokenError::Damaged { .. } | TokenError::Version { .. })) => {
                return refuse(format!("--tokens {error}: delete it, or name a file that is not there"));
            }
            Err(error) => return Err(wrong(error)),
        };
        let as_it_is = match file == self.made[0] {
            true => "leave --text out to train on it as it is, or ",
            false => "",
        };
        let Some(about) = About::of(&found) else {
            return refuse(format!(
                "--tokens {}: it does not say which text it was made of; {as_it_is}name a file that is not there",
                file.display()
            ));
        };
        if let Some(how) = self.difference(&about, true) {
            return other(file, &how);
        }
        if about.files != files {
            self.progress.line(&format!(
                "reading the text, whose files are not as they were when {} was made of it",
                file.display()
            ));
            let text = Corpus::scan(listing)?.digest;
            if about.text != text {
                return refuse(format!(
                    "--tokens {}: it was made of another text ({}, and this is {text}); {as_it_is}delete it, or name \
                     another file",
                    file.display(),
                    about.text
                ));
            }
        }
        Ok(Some(found))
    }

    /// How tokens were made, if not as flags say: those that are given, or all.
    fn difference(&self, about: &About, all: bool) -> Option<String> {
        if about.tokenizer != self.hash {
            return Some("by another tokenizer".into());
        }
        let flags = [
            (
                "--document-separator",
                &about.document_separator,
                &self.data.document_separator,
            ),
            ("--eos", &about.eos, &self.data.eos),
        ];
        let differs = |(_, was, is): &(&str, &Option<String>, &Option<String>)| was != is && (all || is.is_some());
        flags.into_iter().find(differs).map(|(flag, was, _)| match was {
            Some(was) => format!("with {flag} {was}"),
            None => format!("without {flag}"),
        })
    }

    fn make(&self, listing: &Listing, files: String, file: &Path) -> Result<TokenFile, InputError> {
        let corpus = Corpus::scan(listing)?;
        let DataConfig {
            document_separator,
            eos,
            ..
        } = self.data;
        let about = About {
            text: corpus.digest.clone(),
            files,
            tokenizer: self.hash.clone(),
            document_separator: document_separator.clone(),
            eos: eos.clone(),
        };
        let about = serde_json::to_string(&about).map_err(|error| InputError(format!("--tokens: {error}")))?;
        self.progress
            .line(&format!("tokenizing {} into {}", corpus.line(), file.display()));
        let tokenizer = load_tokenizer(self.tokenizer)?;
        let mut maker = Maker {
            eos: eos.as_deref().map(|token| eos_of(&tokenizer, token)).transpose()?,
            writer: TokenWriter::create(file, vocabulary(&tokenizer), &about).map_err(wrong)?,
            tokenizer,
            waiting: Vec::new(),
            bytes: 0,
            begun: false,
        };
        corpus.documents(document_separator.as_deref(), &mut |piece| maker.take(piece))?;
        maker.flush()?;
        maker.writer.finish().map_err(wrong)
    }
}

fn wrong(error: TokenError) -> InputError {
    InputError(format!("--tokens {error}"))
}

/// Refuses a file that holds other tokens.
fn other<T>(file: &Path, how: &str) -> Result<T, InputError> {
    refuse(format!(
        "--tokens {}: it was made {how}; give the same, delete it, or name another file",
        file.display()
    ))
}

/// Hidden, as it lies where the text may be.
fn lock_of(file: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(file.file_name().unwrap_or_default());
    name.push(".lock");
    file.with_file_name(name)
}

/// Turns text into tokens, piece by piece.
struct Maker {
    tokenizer: Tokenizer,
    writer: TokenWriter,
    eos: Option<u32>,
    waiting: Vec<Piece>,
    /// Of those that wait.
    bytes: usize,
    /// Whether the document has tokens.
    begun: bool,
}

impl Maker {
    fn take(&mut self, piece: Piece) -> Result<(), InputError> {
        self.bytes += piece.text.len();
        self.waiting.push(piece);
        match self.bytes >= BATCH || self.waiting.len() >= BATCH / 1024 {
            true => self.flush(),
            false => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), InputError> {
        self.bytes = 0;
        let pieces = std::mem::take(&mut self.waiting);
        let (text, last): (Vec<String>, Vec<bool>) = pieces.into_iter().map(|piece| (piece.text, piece.last)).unzip();
        let encodings = self.tokenizer.encode_batch_fast(text, false);
        let encodings = encodings.map_err(|error| InputError(format!("--tokenizer: {error}")))?;
        for (encoding, last) in encodings.iter().zip(last) {
            self.begun |= !encoding.is_empty();
            self.writer.write(encoding.get_ids()).map_err(wrong)?;
            if last && self.begun {
                self.writer.write(self.eos.as_slice()).map_err(wrong)?;
                self.writer.end_document().map_err(wrong)?;
                self.begun = false;
            }
        }
        Ok(())
    }
}
