//! A new state, which appears whole or not at all.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::tensor::Metadata;

use super::folder::{ABOUT, About, Sum, TENSORS, entries, name, parent, saved_states, step_of};
use super::{StateError, StateInfo};

/// How many states are kept.
const KEPT: usize = 2;

/// Bytes written at a time.
const CHUNK: usize = 1 << 20;

/// A state that is being written, under a name of its own.
pub(super) struct Draft {
    store: PathBuf,
    folder: PathBuf,
    info: StateInfo,
    tensors: Result<TensorFile, StateError>,
}

impl Draft {
    /// Makes the store if need be, removes what earlier runs left half-written, and begins.
    pub fn begin(store: &Path, info: &StateInfo, header: &Metadata) -> Result<Self, StateError> {
        let failed = StateError::write(store);
        if !store.is_dir() {
            fs::create_dir_all(store).map_err(&failed)?;
            sync_folder(parent(store))?;
        }
        let newest = saved_states(store)?.pop();
        if let Some(newest) = newest.filter(|newest| step_of(newest) >= Some(info.step)) {
            return Err(StateError::NotNewest {
                state: newest.display().to_string(),
                step: info.step,
            });
        }
        for path in entries(store)? {
            let called = path.file_name().and_then(|called| called.to_str());
            if called.is_some_and(|called| called.starts_with(".step-") && called.ends_with(".tmp")) {
                fs::remove_dir_all(&path).map_err(StateError::write(&path))?;
            }
        }
        let folder = store.join(hidden(info.step));
        fs::create_dir(&folder).map_err(StateError::write(&folder))?;
        Ok(Self {
            store: store.to_path_buf(),
            tensors: TensorFile::create(folder.join(TENSORS), header),
            info: info.clone(),
            folder,
        })
    }

    /// The bytes of the next tensor of the header. After a failure nothing is written any more.
    pub fn write(&mut self, bytes: &[u8]) {
        if let Ok(tensors) = &mut self.tensors
            && let Err(error) = tensors.write(bytes)
        {
            self.tensors = Err(error);
        }
    }

    /// Puts it in its place, and removes all but the newest states. After a failure nothing of it is left.
    pub fn finish(self) -> Result<(), StateError> {
        let (store, folder, info) = (self.store, self.folder, self.info);
        let place = store.join(name(info.step));
        let published = self.tensors.and_then(|tensors| {
            let about =
                serde_json::to_vec_pretty(&About::new(info, tensors.finish()?)).expect("plain values become JSON");
            let path = folder.join(ABOUT);
            let failed = StateError::write(&path);
            let mut file = File::create(&path).map_err(&failed)?;
            file.write_all(&about).and_then(|()| file.sync_all()).map_err(&failed)?;
            sync_folder(&folder)?;
            fs::rename(&folder, &place).map_err(StateError::write(&place))
        });
        if let Err(error) = published {
            if let Err(left) = fs::remove_dir_all(&folder) {
                tracing::warn!("{} is left, until the next state is saved: {left}", folder.display());
            }
            return Err(error);
        }
        sync_folder(&store)?;
        let states = saved_states(&store)?;
        for old in &states[..states.len().saturating_sub(KEPT)] {
            // Half of a state must not look like one.
            let hidden = store.join(hidden(step_of(old).expect("states are called by their steps")));
            // The new state is safe; what is left of old ones is removed after the next save.
            if let Err(left) = fs::rename(old, &hidden).and_then(|()| fs::remove_dir_all(&hidden)) {
                tracing::warn!("{} cannot be removed: {left}", old.display());
            }
        }
        Ok(())
    }
}

/// The name of a state that is not whole.
fn hidden(step: u64) -> String {
    format!(".{}.tmp", name(step))
}

/// Brings the names in a folder to the disk, where the system can.
fn sync_folder(folder: &Path) -> Result<(), StateError> {
    match cfg!(unix) {
        true => File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(StateError::write(folder)),
        false => Ok(()),
    }
}

/// A safetensors file, written from its start to its end.
struct TensorFile {
    path: PathBuf,
    file: BufWriter<File>,
    hasher: Hasher,
    bytes: u64,
}

impl TensorFile {
    fn create(path: PathBuf, header: &Metadata) -> Result<Self, StateError> {
        let file = File::create(&path).map_err(StateError::write(&path))?;
        let mut tensors = Self {
            path,
            file: BufWriter::with_capacity(CHUNK, file),
            hasher: Hasher::new(),
            bytes: 0,
        };
        let mut header = serde_json::to_vec(header).expect("plain values become JSON");
        // So that tensors are aligned.
        header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
        tensors.write(&(header.len() as u64).to_le_bytes())?;
        tensors.write(&header)?;
        Ok(tensors)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StateError> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(StateError::write(&self.path))
    }

    /// Brings all to the disk.
    fn finish(self) -> Result<Sum, StateError> {
        let failed = StateError::write(&self.path);
        let file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(&failed)?;
        Ok(Sum::new(self.bytes, self.hasher))
    }
}
