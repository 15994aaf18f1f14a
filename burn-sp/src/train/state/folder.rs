//! The folders of states: what they are called, what is in them, and whether that is what was saved.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};

use super::{StateError, StateInfo};

/// The tensors of a state.
pub(super) const TENSORS: &str = "state.safetensors";
/// What is known of a state beside its tensors.
pub(super) const ABOUT: &str = "state.json";
/// Under which [`StateInfo`] stands in the tensors' file too, where the checksum covers it.
pub(super) const INFO: &str = "info";

const FORMAT: &str = "burn-sp training state";
const VERSION: u64 = 1;

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// `state.json`.
#[derive(Serialize, Deserialize)]
pub(super) struct About {
    format: String,
    version: u64,
    #[serde(flatten)]
    info: StateInfo,
    tensors: Sum,
}

/// What the tensors' file must be.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sum {
    pub bytes: u64,
    /// CRC-32 of all bytes, as 8 hexadecimal digits.
    pub crc32: String,
}

impl Sum {
    pub fn new(bytes: u64, hasher: Hasher) -> Self {
        let crc32 = format!("{:08x}", hasher.finalize());
        Self { bytes, crc32 }
    }
}

impl About {
    pub fn new(info: StateInfo, tensors: Sum) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            info,
            tensors,
        }
    }
}

/// The folder of the state after so many steps.
pub(super) fn name(step: u64) -> String {
    format!("step-{step:06}")
}

/// Its inverse.
pub(super) fn step_of(folder: &Path) -> Option<u64> {
    let called = folder.file_name()?.to_str()?;
    let step = called.strip_prefix("step-")?.parse().ok()?;
    (called == name(step)).then_some(step)
}

/// The folders of the states that are saved in a folder, whole or not, the newest last; none if there is no such folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn saved_states(folder: impl AsRef<Path>) -> Result<Vec<PathBuf>, StateError> {
    let mut states = entries(folder.as_ref())?;
    states.retain(|path| step_of(path).is_some() && path.is_dir());
    states.sort_by_key(|path| step_of(path));
    Ok(states)
}

/// What is in a folder; nothing if there is no such folder.
pub(super) fn entries(folder: &Path) -> Result<Vec<PathBuf>, StateError> {
    let failed = StateError::read(folder);
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(&failed)?,
    };
    entries.map(|entry| Ok(entry.map_err(&failed)?.path())).collect()
}

/// The folder of a path; that of a name alone is where the process runs.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// A state on disk whose checksum is right; what [`StateStore::load`](super::StateStore::load) reads.
///
/// Not collective: to look at a state before ranks start, where it can be read.
#[derive(Debug)]
pub struct SavedState {
    folder: PathBuf,
    info: StateInfo,
    pub(super) metadata: Metadata,
    file: File,
    /// Where in the file the tensors begin.
    start: u64,
}

impl SavedState {
    /// The newest state in a folder, or the one whose folder it is; all of it is read.
    ///
    /// # Errors
    /// If there is none, or that one is damaged or of another version. An older one is named then, not taken.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StateError> {
        let path = path.as_ref();
        let shown = || path.display().to_string();
        if !path.is_dir() {
            return Err(StateError::Missing { path: shown() });
        }
        let folder = match step_of(path) {
            Some(_) => path.to_path_buf(),
            None => saved_states(path)?.pop().ok_or(StateError::Empty { path: shown() })?,
        };
        let step = step_of(&folder);
        match Self::read(folder.clone()) {
            Err(StateError::Damaged { state, what, .. }) => {
                let before = saved_states(parent(&folder))?.into_iter().rev();
                let before = before.filter(|other| step_of(other) < step);
                let older = before.filter_map(|folder| Self::read(folder).ok()).next();
                let older = older.map(|older| older.folder.display().to_string());
                Err(StateError::Damaged { state, what, older })
            }
            other => other,
        }
    }

    /// The folder of the state.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it says of its run.
    pub fn info(&self) -> &StateInfo {
        &self.info
    }

    fn read(folder: PathBuf) -> Result<Self, StateError> {
        let damaged = |what: String| StateError::Damaged {
            state: folder.display().to_string(),
            what,
            older: None,
        };
        let about = read_about(&folder, &damaged)?;
        let path = folder.join(TENSORS);
        let failed = StateError::read(&path);
        let mut file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(damaged(format!("it has no {TENSORS}"))),
            file => file.map_err(&failed)?,
        };
        let length = file.metadata().map_err(&failed)?.len();
        if length != about.tensors.bytes {
            let whole = about.tensors.bytes;
            return Err(damaged(format!("{TENSORS} has {length} bytes, not {whole}")));
        }
        let found = sum(&mut file).map_err(&failed)?;
        if found != about.tensors {
            let (found, saved) = (found.crc32, about.tensors.crc32);
            return Err(damaged(format!("the checksum of {TENSORS} is {found}, not {saved}")));
        }
        // From here on it is what was saved, if it is a state at all.
        let header = read_header(&mut file, length).map_err(&failed)?;
        let parsed = header
            .as_ref()
            .and_then(|header| serde_json::from_slice::<Metadata>(header).ok());
        let (Some(header), Some(metadata)) = (header, parsed) else {
            return Err(damaged(format!("{TENSORS} is no safetensors file")));
        };
        let inside = metadata.metadata().as_ref().and_then(|inside| inside.get(INFO));
        let inside = inside.and_then(|info| serde_json::from_str::<StateInfo>(info).ok());
        if inside.as_ref() != Some(&about.info) || step_of(&folder).is_some_and(|step| step != about.info.step) {
            return Err(damaged(format!(
                "{ABOUT}, {TENSORS} and the folder's name do not say the same of the run"
            )));
        }
        Ok(Self {
            info: about.info,
            metadata,
            file,
            start: (size_of::<u64>() + header.len()) as u64,
            folder,
        })
    }

    /// The bytes of a tensor that it has.
    pub(super) fn bytes(&mut self, name: &str) -> Result<Vec<u8>, StateError> {
        let info = self.metadata.info(name).expect("the tensor has been looked up");
        let (from, to) = info.data_offsets;
        let mut bytes = vec![0; to - from];
        let failed = StateError::read(&self.folder.join(TENSORS));
        self.file
            .seek(SeekFrom::Start(self.start + from as u64))
            .map_err(&failed)?;
        self.file.read_exact(&mut bytes).map_err(&failed)?;
        Ok(bytes)
    }
}

fn read_about(folder: &Path, damaged: &impl Fn(String) -> StateError) -> Result<About, StateError> {
    let path = folder.join(ABOUT);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(damaged(format!("it has no {ABOUT}"))),
        text => text.map_err(StateError::read(&path))?,
    };
    let unreadable = |error: serde_json::Error| damaged(format!("{ABOUT} cannot be read: {error}"));
    let json: serde_json::Value = serde_json::from_slice(&text).map_err(unreadable)?;
    if json["format"] != FORMAT {
        return Err(damaged(format!("{ABOUT} does not begin as that of a {FORMAT}")));
    }
    match json["version"].as_u64() {
        Some(found) if found != VERSION => Err(StateError::Version {
            state: folder.display().to_string(),
            found,
            reads: VERSION,
        }),
        _ => serde_json::from_value(json).map_err(unreadable),
    }
}

/// Of all bytes of a file.
fn sum(file: &mut File) -> std::io::Result<Sum> {
    let (mut hasher, mut bytes, mut chunk) = (Hasher::new(), 0, Vec::with_capacity(CHUNK));
    file.seek(SeekFrom::Start(0))?;
    loop {
        chunk.clear();
        match file.take(CHUNK as u64).read_to_end(&mut chunk)? {
            0 => return Ok(Sum::new(bytes, hasher)),
            read => {
                hasher.update(&chunk);
                bytes += read as u64;
            }
        }
    }
}

/// The header of a safetensors file; none if it is longer than the file.
fn read_header(file: &mut File, length: u64) -> std::io::Result<Option<Vec<u8>>> {
    let mut size = [0; size_of::<u64>()];
    if length < size.len() as u64 {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    if size > length - size_of::<u64>() as u64 {
        return Ok(None);
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)?;
    Ok(Some(header))
}
