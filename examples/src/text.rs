//! Text as bytes: what is read, which part is held out, and which windows a step sees.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::InputError;
use crate::draw::below;

/// The end of the text that is held out for validation: one in so many bytes.
const HELD_OUT: usize = 10;

/// The generator's streams below are dropout's (layer and step); this bit keeps data apart.
const STREAM: u64 = 1 << 63;

/// A text, its end held out.
#[derive(Clone, Debug)]
pub struct Text {
    bytes: Vec<u8>,
    files: usize,
    skipped: usize,
}

impl Text {
    /// Reads files, and folders with all that is in them (in the order of their names; hidden ones and `target/` are
    /// passed over, and so is what is not UTF-8). With no paths: this workspace's sources and documentation.
    ///
    /// # Errors
    /// If a path cannot be read or a file that is named is no text.
    pub fn read(paths: Option<&[PathBuf]>) -> Result<Self, InputError> {
        let mut text = Text::new(Vec::new());
        match paths {
            Some(paths) => {
                for path in paths {
                    text.add(path, path.is_file(), &|_| true)?;
                }
            }
            None => {
                let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
                let wanted = |path: &Path| {
                    let extension = path.extension().and_then(|extension| extension.to_str());
                    matches!(extension, Some("rs" | "md" | "toml"))
                };
                if let Err(InputError(line)) = text.add(&workspace, false, &wanted) {
                    return Err(InputError(format!(
                        "the sources that this program was built from are gone ({line}); give --text PATH"
                    )));
                }
            }
        }
        Ok(text)
    }

    /// A text from bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            files: 0,
            skipped: 0,
        }
    }

    /// What tells it apart from other texts.
    pub fn digest(&self) -> String {
        let mut hash = DefaultHasher::new();
        self.bytes.hash(&mut hash);
        format!("{} bytes, hash {:016x}", self.bytes.len(), hash.finish())
    }

    fn add(&mut self, path: &Path, named: bool, wanted: &dyn Fn(&Path) -> bool) -> Result<(), InputError> {
        let wrong = |error: &dyn std::fmt::Display| InputError(format!("--text {}: {error}", path.display()));
        if path.is_dir() {
            let entries = fs::read_dir(path).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
            let mut entries = entries.map_err(|error| wrong(&error))?;
            entries.sort_by_key(|entry| entry.file_name());
            for entry in entries {
                let name = entry.file_name();
                let hidden = name.to_string_lossy().starts_with('.');
                // A link may lead in circles.
                let link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
                if !hidden && !link && name != "target" {
                    self.add(&entry.path(), false, wanted)?;
                }
            }
            return Ok(());
        }
        if !named && (!path.is_file() && path.exists() || !wanted(path)) {
            return Ok(());
        }
        let bytes = fs::read(path).map_err(|error| wrong(&error))?;
        match std::str::from_utf8(&bytes) {
            Ok(_) => {
                self.files += 1;
                self.bytes.extend(bytes);
            }
            Err(error) if named => return Err(wrong(&format!("not UTF-8 text: {error}"))),
            Err(_) => self.skipped += 1,
        }
        Ok(())
    }

    /// What was read, in one line.
    pub fn line(&self) -> String {
        let skipped = match self.skipped {
            0 => String::new(),
            skipped => format!(", {skipped} passed over (not UTF-8)"),
        };
        format!(
            "text: {} bytes from {} files{skipped}; the last {} are held out",
            self.bytes.len(),
            self.files,
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
