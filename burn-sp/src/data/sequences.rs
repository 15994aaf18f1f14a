use std::ops::Range;
use std::sync::Arc;

use super::{PackedSequence, TokenError, TokenFile};

/// The tokens of a file cut into sequences of one length, one after another: the samples of a data set.
///
/// Every token is in exactly one of them and, but for the last, the label of the one before. The last sequence is filled up if
/// tokens run out. Cloning shares the file.
#[derive(Clone, Debug)]
pub struct TokenSequences {
    file: Arc<TokenFile>,
    len: usize,
    boundaries: bool,
    /// Which of the file's sequences.
    range: Range<u64>,
}

impl TokenSequences {
    /// Sequences of `len` tokens that run over the documents' ends: a token's label is what follows it in the file.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn new(file: impl Into<Arc<TokenFile>>, len: usize) -> Self {
        let file = file.into();
        assert!(
            len > 0,
            "TokenSequences: {} in sequences of 0 tokens",
            file.path().display()
        );
        Self {
            range: 0..file.len().div_ceil(len as u64),
            boundaries: false,
            file,
            len,
        }
    }

    /// With the documents' ends, which attention and labels respect: see [`PackedSequence`].
    pub fn with_boundaries(self) -> Self {
        Self {
            boundaries: true,
            ..self
        }
    }

    /// Some of these sequences.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn slice(&self, range: Range<u64>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.count(),
            "TokenSequences: {range:?} of {} sequences",
            self.count()
        );
        Self {
            range: self.range.start + range.start..self.range.start + range.end,
            ..self.clone()
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Their file.
    pub fn file(&self) -> &TokenFile {
        &self.file
    }

    /// Reads one.
    ///
    /// # Errors
    /// If the file cannot be read.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn get(&self, index: u64) -> Result<PackedSequence, TokenError> {
        assert!(
            index < self.count(),
            "TokenSequences: {index} of {} sequences",
            self.count()
        );
        let start = (self.range.start + index) * self.len as u64;
        let end = (start + self.len as u64).min(self.file.len());
        let mut tokens = self.file.tokens(start..(end + 1).min(self.file.len()))?;
        let next = tokens.get((end - start) as usize).copied();
        tokens.truncate((end - start) as usize);
        let ends = match self.boundaries {
            true => self.file.ends(start..end)?,
            false => Vec::new(),
        };
        Ok(PackedSequence::new(&tokens, next, &ends, self.len))
    }
}
