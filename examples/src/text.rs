//! Text as bytes: what is read, which part is held out, and which windows a step sees.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::InputError;
use crate::draw::below;
use crate::fnv::Fnv;
use crate::listing::{Found, Listing, passed_over, wrong};

/// The end of the text that is held out for validation: one in so many bytes.
const HELD_OUT: usize = 10;

/// The generator's streams below are dropout's (layer and step); this bit keeps data apart.
const STREAM: u64 = 1 << 63;

/// A text, its end held out.
#[derive(Clone, Debug)]
pub struct Text {
    bytes: Vec<u8>,
    files: usize,
    /// Files that are no text, and what is no file.
    passed: [usize; 2],
}

impl Text {
    /// Reads files, and folders with all that is in them (in the order of their names; hidden ones and `target/` are left
    /// out; what is not UTF-8, and links to folders, are passed over). With no paths: this workspace's sources and
    /// documentation.
    ///
    /// # Errors
    /// If a path cannot be read, or is neither a folder nor a file of text.
    pub fn read(paths: Option<&[PathBuf]>) -> Result<Self, InputError> {
        let mut text = Text::new(Vec::new());
        let listing = Listing::of(paths)?;
        text.passed[1] = listing.passed;
        for Found { path, named } in listing.files {
            let bytes = fs::read(&path).map_err(|error| wrong(&path, error))?;
            match std::str::from_utf8(&bytes) {
                Ok(_) => {
                    text.files += 1;
                    text.bytes.extend(bytes);
                }
                Err(error) if named => return Err(wrong(&path, format!("not UTF-8 text: {error}"))),
                Err(_) => text.passed[0] += 1,
            }
        }
        Ok(text)
    }

    /// A text from bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            files: 0,
            passed: [0; 2],
        }
    }

    /// What tells it apart from other texts.
    pub fn digest(&self) -> String {
        let hash = Fnv::new().bytes(&self.bytes);
        format!("{} bytes, hash {}", self.bytes.len(), hash.hex())
    }

    /// What was read, in one line.
    pub fn line(&self) -> String {
        let [foreign, passed] = self.passed;
        format!(
            "text: {} bytes from {} files{}; the last {} are held out",
            self.bytes.len(),
            self.files,
            passed_over(foreign, passed),
            self.held_out().len()
        )
    }

    /// Checks that there is a window to train on, and something to validate with.
    ///
    /// # Errors
    /// If there is not.
    pub fn check(&self, seq_len: usize) -> Result<(), InputError> {
        let training = self.training().len();
        if self.bytes.is_empty() {
            return Err(InputError(
                "text: there is none; give --text PATH with UTF-8 files".into(),
            ));
        }
        if training < seq_len + 1 || self.held_out().len() < 2 {
            let work = match training {
                0..2 => "give more text".into(),
                _ => format!("give more text, or --seq-len {} at most", training - 1),
            };
            return Err(InputError(format!(
                "text: {} bytes are too short, as {training} for training hold no sequence of {seq_len} and the byte \
                 after it; {work}",
                self.bytes.len()
            )));
        }
        Ok(())
    }

    fn split(&self) -> usize {
        self.bytes.len() - self.bytes.len().div_ceil(HELD_OUT)
    }

    /// The bytes to train on.
    pub fn training(&self) -> &[u8] {
        &self.bytes[..self.split()]
    }

    /// The bytes to validate with.
    pub fn held_out(&self) -> &[u8] {
        &self.bytes[self.split()..]
    }

    /// The window of a sample: `seq_len` tokens and the one after, at an offset that depends on seed, step and sample
    /// only.
    pub fn window(&self, seed: u64, step: u64, sample: u64, seq_len: usize) -> &[u8] {
        let offsets = (self.training().len() - seq_len) as u64;
        let offset = below(offsets, seed, STREAM | step, sample) as usize;
        &self.training()[offset..][..seq_len + 1]
    }

    /// The windows of some samples of a step, the same on every rank.
    ///
    /// # Shapes
    /// - returns `[samples, seq_len + 1]`
    pub fn windows(
        &self,
        seed: u64,
        step: u64,
        samples: Range<u64>,
        seq_len: usize,
        device: &Device,
    ) -> Tensor<2, Int> {
        let windows = samples.map(|sample| self.window(seed, step, sample, seq_len));
        batch(windows, device)
    }

    /// About `count` windows at even distances over what is held out (fewer if they would overlap, but at least
    /// `batch_size`), in batches of at least `batch_size`.
    ///
    /// # Shapes
    /// - each `[samples, seq_len + 1]`, or narrower if less is held out
    pub fn validation(&self, count: usize, seq_len: usize, batch_size: usize, device: &Device) -> Vec<Tensor<2, Int>> {
        let held_out = self.held_out();
        let width = held_out.len().min(seq_len + 1);
        let count = count.min(held_out.len() / width).max(batch_size);
        let offset = |index: usize| index * (held_out.len() - width) / (count - 1).max(1);
        let batches = count / batch_size;
        (0..batches)
            .map(|index| {
                let samples = index * count / batches..(index + 1) * count / batches;
                batch(samples.map(|sample| &held_out[offset(sample)..][..width]), device)
            })
            .collect()
    }
}

fn batch<'a>(windows: impl Iterator<Item = &'a [u8]>, device: &Device) -> Tensor<2, Int> {
    let (mut rows, mut tokens) = (0, Vec::new());
    for window in windows {
        rows += 1;
        tokens.extend(window.iter().map(|byte| i64::from(*byte)));
    }
    let width = tokens.len() / rows;
    Tensor::from_data(TensorData::new(tokens, [rows, width]), device)
}
