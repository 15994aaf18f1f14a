use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crc32fast::Hasher;

use super::TokenError;

const MAGIC: [u8; 8] = *b"BSPTOKEN";
const VERSION: u32 = 1;

/// Bytes of the header, before the text about it.
pub(super) const HEADER: u64 = 56;

/// Bytes of a document's end.
pub(super) const END: u64 = 8;

/// Bytes read at a time where all are read.
const CHUNK: u64 = 1 << 20;

/// Documents' ends read at a time.
const ENDS: u64 = 128;

/// The first bytes of a file, all little-endian: 8 of "BSPTOKEN", the version (u32), the bytes of a token (u32: 2 or 4), the
/// vocabulary's size, the number of tokens, of documents, and the bytes of the text (all u64), then two CRC-32 (u32), of
/// tokens and ends, and of the header before it and the text. It is followed by the text in UTF-8, the tokens, and for each
/// document the number of tokens up to its end (u64), each of the three filled up with zeros to a multiple of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub width: u32,
    pub vocabulary: u64,
    pub tokens: u64,
    pub documents: u64,
    pub about: u64,
    pub sum: u32,
}

impl Header {
    /// Two bytes a token where that is enough.
    pub fn new(vocabulary: u64, about: &str) -> Self {
        Self {
            width: if vocabulary <= 1 << 16 { 2 } else { 4 },
            vocabulary,
            tokens: 0,
            documents: 0,
            about: about.len() as u64,
            sum: 0,
        }
    }

    pub fn bytes(&self, about: &str) -> [u8; HEADER as usize] {
        let mut bytes = Vec::from(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.width.to_le_bytes());
        for number in [self.vocabulary, self.tokens, self.documents, self.about] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.sum.to_le_bytes());
        bytes.extend(sum_of(&bytes, about.as_bytes()).to_le_bytes());
        bytes.try_into().expect("the header has a fixed length")
    }

    /// Where tokens start.
    pub fn start(&self) -> u64 {
        HEADER + self.about.next_multiple_of(END)
    }

    /// Where the documents' ends start, and where the file ends; none if no file is that long.
    fn layout(&self) -> Option<(u64, u64)> {
        let start = HEADER.checked_add(self.about.checked_next_multiple_of(END)?)?;
        let tokens = self.tokens.checked_mul(u64::from(self.width))?;
        let ends = start.checked_add(tokens.checked_next_multiple_of(END)?)?;
        Some((ends, ends.checked_add(self.documents.checked_mul(END)?)?))
    }
}

fn sum_of(header: &[u8], about: &[u8]) -> u32 {
    let mut hasher = Hasher::new();
    hasher.update(header);
    hasher.update(about);
    hasher.finalize()
}

/// The tokens of a corpus in a file that may be larger than memory, and where its documents end; written by
/// [`TokenWriter`](super::TokenWriter).
///
/// Only what is asked for is read. Ranks that are threads may share one.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: Mutex<File>,
    header: Header,
    about: String,
    /// Where the documents' ends start.
    ends: u64,
}

impl TokenFile {
    /// Opens a file and checks that it is one, and whole by its length; [`verify`](Self::verify) reads all of it.
    ///
    /// # Errors
    /// If it cannot be read, is something else, is of another version, was cut off, or its header is damaged.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, TokenError> {
        let path = path.into();
        let failed = TokenError::read(&path);
        let shown = || path.display().to_string();
        let damaged = |what: String| TokenError::Damaged { path: shown(), what };
        let mut file = File::open(&path).map_err(&failed)?;
        let length = file.metadata().map_err(&failed)?.len();
        let mut bytes = [0; HEADER as usize];
        match file.read_exact(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Err(TokenError::Foreign { path: shown() });
            }
            read => read.map_err(&failed)?,
        }
        if bytes[..8] != MAGIC {
            return Err(TokenError::Foreign { path: shown() });
        }
        let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if short(8) != VERSION {
            return Err(TokenError::Version {
                path: shown(),
                found: short(8),
                reads: VERSION,
            });
        }
        let header = Header {
            width: short(12),
            vocabulary: long(16),
            tokens: long(24),
            documents: long(32),
            about: long(40),
            sum: short(48),
        };
        let Some((ends, whole)) = header.layout() else {
            return Err(damaged("its header asks for more than a file can hold".into()));
        };
        if length != whole {
            return Err(damaged(format!("it has {length} bytes, not {whole}")));
        }
        let mut about = vec![0; header.about as usize];
        file.read_exact(&mut about).map_err(&failed)?;
        if sum_of(&bytes[..52], &about) != short(52) {
            return Err(damaged("the checksum of its header is another".into()));
        }
        let about = String::from_utf8(about).map_err(|error| damaged(error.to_string()))?;
        Ok(Self {
            file: Mutex::new(file),
            path,
            header,
            about,
            ends,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whatever was said about it when it was written.
    pub fn about(&self) -> &str {
        &self.about
    }

    /// Entries of the vocabulary: every token is below.
    pub fn vocabulary(&self) -> usize {
        self.header.vocabulary as usize
    }

    /// How many tokens there are.
    pub fn len(&self) -> u64 {
        self.header.tokens
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many documents there are.
    pub fn documents(&self) -> u64 {
        self.header.documents
    }

    /// CRC-32 of tokens and ends, as they were written.
    pub fn checksum(&self) -> u32 {
        self.header.sum
    }

    /// The tokens at these places.
    ///
    /// # Errors
    /// If there are fewer, the file cannot be read, or a token is not of the vocabulary.
    pub fn tokens(&self, range: Range<u64>) -> Result<Vec<u32>, TokenError> {
        if range.start > range.end || range.end > self.len() {
            return Err(TokenError::Window {
                path: self.path.display().to_string(),
                asked: range,
                tokens: self.len(),
            });
        }
        let width = u64::from(self.header.width);
        let bytes = self.read(
            self.header.start() + range.start * width,
            (range.end - range.start) * width,
        )?;
        let tokens: Vec<u32> = match width {
            2 => {
                let pairs = bytes.as_chunks::<2>().0.iter();
                pairs.map(|pair| u32::from(u16::from_le_bytes(*pair))).collect()
            }
            _ => bytes
                .as_chunks::<4>()
                .0
                .iter()
                .copied()
                .map(u32::from_le_bytes)
                .collect(),
        };
        match tokens.iter().find(|id| u64::from(**id) >= self.header.vocabulary) {
            Some(id) => Err(TokenError::Id {
                path: self.path.display().to_string(),
                id: *id,
                vocabulary: self.header.vocabulary,
            }),
            None => Ok(tokens),
        }
    }

    /// Where documents end after the first of these tokens and up to the last: `1` for a document of the first token alone.
    /// As counted from the range's start. Found by bisection, as the ends may be more than memory holds, too.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn ends(&self, range: Range<u64>) -> Result<Vec<usize>, TokenError> {
        let (mut low, mut high) = (0, self.documents());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.ends_of(middle..middle + 1)?[0] <= range.start {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        let (mut found, mut before) = (Vec::new(), range.start);
        while low < self.documents() {
            let next = (low + ENDS).min(self.documents());
            for end in self.ends_of(low..next)? {
                if end <= before {
                    return Err(TokenError::Damaged {
                        path: self.path.display().to_string(),
                        what: format!("a document ends at token {end}, after one that ends at {before}"),
                    });
                }
                if end > range.end {
                    return Ok(found);
                }
                found.push((end - range.start) as usize);
                before = end;
            }
            low = next;
        }
        Ok(found)
    }

    /// Reads all of it and compares its checksum.
    ///
    /// # Errors
    /// If it is another, or the file cannot be read.
    pub fn verify(&self) -> Result<(), TokenError> {
        let mut hasher = Hasher::new();
        let (mut at, end) = (self.header.start(), self.ends + self.documents() * END);
        while at < end {
            let bytes = self.read(at, CHUNK.min(end - at))?;
            hasher.update(&bytes);
            at += bytes.len() as u64;
        }
        let (found, written) = (hasher.finalize(), self.header.sum);
        match found == written {
            true => Ok(()),
            false => Err(TokenError::Damaged {
                path: self.path.display().to_string(),
                what: format!("its checksum is {found:08x}, not {written:08x}"),
            }),
        }
    }

    /// Of these documents, how many tokens there are up to their ends.
    fn ends_of(&self, documents: Range<u64>) -> Result<Vec<u64>, TokenError> {
        let bytes = self.read(
            self.ends + documents.start * END,
            (documents.end - documents.start) * END,
        )?;
        Ok(bytes.as_chunks().0.iter().copied().map(u64::from_le_bytes).collect())
    }

    fn read(&self, at: u64, bytes: u64) -> Result<Vec<u8>, TokenError> {
        let mut read = vec![0; bytes as usize];
        // Whoever reads says where, so a reader that panicked leaves nothing behind.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))
            .and_then(|_| file.read_exact(&mut read))
            .map_err(TokenError::read(&self.path))?;
        Ok(read)
    }
}
