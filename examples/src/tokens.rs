//! Text as the tokens of a tokenizer: a file of them is read a sequence at a time.

use std::path::{Path, PathBuf};

use burn_sp::SpDevice;
use burn_sp::comm::{CommError, raise};
use burn_sp::data::{Sampler, TokenBatch, TokenError, TokenFile, TokenSequences};
use burn_sp::layout::{Axis, Split};
use indicatif::HumanCount;
use tokenizers::Tokenizer;

use crate::InputError;
use crate::config::{TrainConfig, refuse};
use crate::progress::Progress;
use crate::tokenize::Tokenizing;

/// The end of the sequences that is held out for validation: one in so many.
const HELD_OUT: u64 = 10;

/// A tokenizer from its `tokenizer.json`, which neither cuts nor fills up.
///
/// # Errors
/// If it cannot be read.
pub fn load_tokenizer(path: &Path) -> Result<Tokenizer, InputError> {
    let wrong = |error: tokenizers::Error| {
        let error = error.to_string().replace('\n', " ");
        InputError(format!(
            "--tokenizer {}: {error}; name a tokenizer.json",
            path.display()
        ))
    };
    let mut tokenizer = Tokenizer::from_file(path).map_err(wrong)?;
    tokenizer.with_truncation(None).map_err(wrong)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// Entries of a vocabulary that has all its ids.
pub fn vocabulary(tokenizer: &Tokenizer) -> usize {
    let ids = tokenizer.get_vocab(true);
    ids.values().max().map_or(0, |id| *id as usize + 1)
}

/// The data of a run: sequences to train on, and sequences held out.
pub(crate) struct Tokens {
    training: TokenSequences,
    held_out: TokenSequences,
    sampler: Sampler,
    pack: bool,
    /// Sequences of a step.
    step: u64,
}

impl Tokens {
    /// Opens the files that the configuration names. Those of text are made before, unless they are there already, made of
    /// the same text by the same tokenizer; processes of one machine wait for the first of them to do it.
    ///
    /// # Errors
    /// If they cannot be made or read, hold too few tokens, or tokens that the model has not.
    pub fn open(config: &TrainConfig, progress: &Progress) -> Result<Self, InputError> {
        let (data, text) = (&config.data, config.text.as_deref());
        let file = data.file(text)?;
        let made = [file.clone(), beside(&file, ".held-out")];
        let tokenizing = data.tokenizer.as_deref();
        let tokenizing = tokenizing.map(|tokenizer| Tokenizing::new(data, tokenizer, &made, progress));
        let tokenizing = tokenizing.transpose()?;
        let opened = |file: &Path| TokenFile::open(file).map_err(|error| InputError(format!("tokens: {error}")));
        let training = match (&tokenizing, text) {
            (Some(tokenizing), Some(text)) => tokenizing.of(text, &file)?,
            (Some(tokenizing), None) => tokenizing.kept(&file)?,
            (None, _) => opened(&file)?,
        };
        let (training, held_out) = match &data.held_out {
            None => split(training, config)?,
            Some(path) => {
                let held_out = match &tokenizing {
                    Some(tokenizing) => tokenizing.of(std::slice::from_ref(path), &made[1])?,
                    None => opened(path)?,
                };
                let (training, held_out) = (sequences(training, config), sequences(held_out, config));
                enough(
                    training.file(),
                    config.run.seq_len as u64 + 1,
                    "a sequence and the token after it",
                )?;
                enough(held_out.file(), 2, "a token and the one after it")?;
                (training, held_out)
            }
        };
        for file in [training.file(), held_out.file()] {
            if file.vocabulary() > config.vocabulary {
                return refuse(format!(
                    "{} has tokens of a vocabulary of {}, the model one of {}; use the tokenizer of the model",
                    file.path().display(),
                    file.vocabulary(),
                    config.vocabulary
                ));
            }
        }
        Ok(Self {
            sampler: Sampler::new(training.count(), config.run.batch, config.run.seed),
            pack: config.data.pack,
            step: (config.run.batch * config.run.accumulate) as u64,
            training,
            held_out,
        })
    }

    /// What was read, in one line.
    pub fn line(&self) -> String {
        let count = |number: u64| HumanCount(number);
        let file = self.training.file();
        let held_out = match file.path() == self.held_out.file().path() {
            true => format!("the last {} are held out", count(self.held_out.count())),
            false => format!(
                "{} of {} are held out",
                count(self.held_out.count()),
                self.held_out.file().path().display()
            ),
        };
        format!(
            "tokens: {} of {} documents in {}, an epoch is {} sequences, {} steps; {held_out}",
            count(file.len()),
            count(file.documents()),
            file.path().display(),
            count(self.training.count()),
            count(self.training.count().div_ceil(self.step)),
        )
    }

    /// What tells them apart from others, on any host.
    pub fn digest(&self) -> String {
        let of = |file: &TokenFile| format!("{} tokens, checksum {:08x}", file.len(), file.checksum());
        format!("{}; held out {}", of(self.training.file()), of(self.held_out.file()))
    }

    /// What this rank's replica trains on in a micro-step.
    pub fn batch(&self, micro_step: u64, device: &SpDevice) -> TokenBatch {
        self.read(&self.training, &self.sampler.batch(micro_step), device)
    }

    /// Held-out sequences at even distances, about `count`, in batches of `batch`. Of few some come more than once.
    pub fn validation(&self, count: usize, batch: usize, device: &SpDevice) -> Vec<TokenBatch> {
        let batches = (count / batch).max(1) as u64;
        let (all, batch) = (self.held_out.count(), batch as u64);
        let place = |index: u64| (u128::from(index) * u128::from(all) / u128::from(batches * batch)) as u64;
        (0..batches)
            .map(|number| {
                let places: Vec<u64> = (number * batch..(number + 1) * batch).map(place).collect();
                self.read(&self.held_out, &places, device)
            })
            .collect()
    }

    /// Reads this replica's share of some sequences. What cannot be read ends the run, with the same report on every rank.
    fn read(&self, sequences: &TokenSequences, places: &[u64], device: &SpDevice) -> TokenBatch {
        let mesh = device.mesh();
        let parts = Split::Contiguous.parts(places.len(), mesh.size(Axis::Dp));
        let own = parts
            .of(mesh.coordinate(Axis::Dp))
            .iter()
            .flat_map(|range| &places[range.clone()]);
        let own: Result<Vec<_>, TokenError> = own.map(|place| sequences.get(*place)).collect();
        let own = own.unwrap_or_else(|error| raise(CommError::failed(device.rank(), error)));
        match self.pack {
            true => TokenBatch::packed(&own, device),
            false => TokenBatch::rows(&own, places.len(), device),
        }
    }
}

fn sequences(file: TokenFile, config: &TrainConfig) -> TokenSequences {
    let sequences = TokenSequences::new(file, config.run.seq_len);
    match config.data.pack {
        true => sequences.with_boundaries(),
        false => sequences,
    }
}

/// The file's sequences, but for the last tenth, and those; one of them is full.
fn split(file: TokenFile, config: &TrainConfig) -> Result<(TokenSequences, TokenSequences), InputError> {
    enough(
        &file,
        2 * config.run.seq_len as u64,
        "two sequences, of which one is held out",
    )?;
    let all = sequences(file, config);
    let full = all.file().len() / config.run.seq_len as u64;
    let split = full - full.div_ceil(HELD_OUT);
    Ok((all.slice(0..split), all.slice(split..all.count())))
}

fn enough(file: &TokenFile, tokens: u64, what: &str) -> Result<(), InputError> {
    match file.len() >= tokens {
        true => Ok(()),
        false => refuse(format!(
            "{}: {} tokens are too few for {what} ({tokens}); give more text, or a smaller --seq-len",
            file.path().display(),
            file.len()
        )),
    }
}

fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_os_string();
    name.push(ending);
    file.with_file_name(name)
}

/// The id of the token that ends documents.
///
/// # Errors
/// If the tokenizer has no such token.
pub(crate) fn eos_of(tokenizer: &Tokenizer, token: &str) -> Result<u32, InputError> {
    tokenizer.token_to_id(token).ok_or_else(|| {
        InputError(format!(
            "--eos {token}: the tokenizer has no such token; name the one that ends a text, such as </s> or <|endoftext|>"
        ))
    })
}
