use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;

use super::file::{END, Header};
use super::{TokenError, TokenFile};

/// Bytes written, or copied, at a time.
const CHUNK: usize = 1 << 20;

/// Writes a [`TokenFile`] from its start to its end, holding nothing of it in memory.
///
/// It is written beside under another name (`.NAME.tmp`; where documents end is kept in `.NAME.ends.tmp` meanwhile) and renamed
/// when all of it is on the disk: a file of that name is always whole. One writer at a time may write a file.
#[derive(Debug)]
pub struct TokenWriter {
    path: PathBuf,
    header: Header,
    about: String,
    tokens: Temporary,
    ends: Temporary,
    hasher: Hasher,
    /// Whether tokens were written since the last document ended.
    open: bool,
}

impl TokenWriter {
    /// For tokens below `vocabulary`, two bytes each if that is enough. `about` is whatever a reader should know.
    ///
    /// # Errors
    /// If a file cannot be made there.
    ///
    /// # Panics
    /// If the vocabulary is empty or has more than 2^32 entries.
    pub fn create(path: impl Into<PathBuf>, vocabulary: usize, about: &str) -> Result<Self, TokenError> {
        let path = path.into();
        assert!(
            (1..=1 << 32).contains(&(vocabulary as u64)),
            "TokenWriter: a vocabulary of {vocabulary}; tokens are numbers of 32 bits"
        );
        let header = Header::new(vocabulary as u64, about);
        let mut tokens = Temporary::create(beside(&path, ".tmp"))?;
        // Without its numbers, which are not known yet, it is no file of tokens.
        tokens.put(&vec![0; header.start() as usize])?;
        tokens.put_at(super::file::HEADER, about.as_bytes())?;
        Ok(Self {
            ends: Temporary::create(beside(&path, ".ends.tmp"))?,
            about: about.into(),
            hasher: Hasher::new(),
            open: false,
            path,
            header,
            tokens,
        })
    }

    /// The next tokens of a document; all of them or a part.
    ///
    /// # Errors
    /// If one is not of the vocabulary, or the file cannot be written.
    pub fn write(&mut self, tokens: &[u32]) -> Result<(), TokenError> {
        if let Some(id) = tokens.iter().find(|id| u64::from(**id) >= self.header.vocabulary) {
            return Err(TokenError::Id {
                path: self.path.display().to_string(),
                id: *id,
                vocabulary: self.header.vocabulary,
            });
        }
        let bytes: Vec<u8> = match self.header.width {
            // It is below the vocabulary.
            2 => tokens.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect(),
            _ => tokens.iter().flat_map(|id| id.to_le_bytes()).collect(),
        };
        self.header.tokens += tokens.len() as u64;
        self.open |= !tokens.is_empty();
        self.put(&bytes)
    }

    /// Ends the document. One without tokens is none.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn end_document(&mut self) -> Result<(), TokenError> {
        if !self.open {
            return Ok(());
        }
        self.open = false;
        self.header.documents += 1;
        self.ends.put(&self.header.tokens.to_le_bytes())
    }

    /// Ends the last document, if it has not been, and puts the file in its place.
    ///
    /// # Errors
    /// If it cannot be written; a file that was there before stays.
    pub fn finish(mut self) -> Result<TokenFile, TokenError> {
        self.end_document()?;
        let bytes = self.header.tokens * u64::from(self.header.width);
        let fill = bytes.next_multiple_of(END) - bytes;
        self.put(&[0; END as usize][..fill as usize])?;

        let failed = TokenError::read(&self.ends.path);
        let mut left = self.header.documents * END;
        self.ends.file.seek(SeekFrom::Start(0)).map_err(&failed)?;
        while left > 0 {
            let mut chunk = vec![0; left.min(CHUNK as u64) as usize];
            self.ends.file.get_mut().read_exact(&mut chunk).map_err(&failed)?;
            self.put(&chunk)?;
            left -= chunk.len() as u64;
        }

        self.header.sum = self.hasher.clone().finalize();
        self.tokens.put_at(0, &self.header.bytes(&self.about))?;
        self.tokens.publish(&self.path)?;
        TokenFile::open(self.path)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), TokenError> {
        self.hasher.update(bytes);
        self.tokens.put(bytes)
    }
}

/// The name of a file that is not whole.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(ending);
    path.with_file_name(name)
}

/// A file that is removed unless it is published.
#[derive(Debug)]
struct Temporary {
    path: PathBuf,
    file: BufWriter<File>,
    published: bool,
}

impl Temporary {
    fn create(path: PathBuf) -> Result<Self, TokenError> {
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path);
        Ok(Self {
            file: BufWriter::with_capacity(CHUNK, file.map_err(TokenError::write(&path))?),
            path,
            published: false,
        })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), TokenError> {
        self.file.write_all(bytes).map_err(TokenError::write(&self.path))
    }

    /// Over what was put there before.
    fn put_at(&mut self, at: u64, bytes: &[u8]) -> Result<(), TokenError> {
        let over = |file: &mut BufWriter<File>| -> io::Result<()> {
            file.seek(SeekFrom::Start(at))?;
            file.write_all(bytes)?;
            file.seek(SeekFrom::End(0))?;
            Ok(())
        };
        over(&mut self.file).map_err(TokenError::write(&self.path))
    }

    /// Brings it to the disk and then to its name.
    fn publish(&mut self, path: &Path) -> Result<(), TokenError> {
        let all = |file: &mut BufWriter<File>| file.flush().and_then(|()| file.get_ref().sync_all());
        all(&mut self.file).map_err(TokenError::write(&self.path))?;
        fs::rename(&self.path, path).map_err(TokenError::write(path))?;
        self.published = true;
        // The name, too, where the system can.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        match cfg!(unix) {
            true => File::open(folder)
                .and_then(|folder| folder.sync_all())
                .map_err(TokenError::write(folder)),
            false => Ok(()),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.published
            && let Err(left) = fs::remove_file(&self.path)
        {
            tracing::warn!("{} is left: {left}", self.path.display());
        }
    }
}
