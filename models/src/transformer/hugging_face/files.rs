use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::draft::readable;
use crate::import::ImportError;

/// The tensors, if they are in one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// Which tensor is in which file, if they are in several.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// What is known of the tensors of a checkpoint; none of them is held.
#[derive(Debug)]
pub(super) struct Files {
    pub place: PathBuf,
    /// In the order of their names.
    pub files: Vec<TensorFile>,
    /// In which file each tensor is, and of what dtype.
    pub tensors: BTreeMap<String, (usize, Dtype)>,
    /// What the index says beside where tensors are.
    pub about: Map<String, Value>,
}

/// A file of tensors.
#[derive(Clone, Debug)]
pub(super) struct TensorFile {
    pub name: String,
    /// Its `__metadata__`.
    pub about: Option<HashMap<String, String>>,
}

impl Files {
    pub fn open(place: &Path) -> Result<Self, ImportError> {
        let maps = Maps::open(place)?;
        let folder = &maps.folder;
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for (index, (name, map)) in maps.files.iter().enumerate() {
            let (_, header) = SafeTensors::read_metadata(map).map_err(|error| cut(&folder.join(name), error))?;
            for (tensor, info) in header.tensors() {
                if let Some((other, _)) = tensors.insert(tensor.clone(), (index, info.dtype)) {
                    let (other, _) = &maps.files[other];
                    let why = format!("{tensor:?} is in {other} too; a tensor is in one file");
                    return Err(ImportError::file(&folder.join(name), why));
                }
            }
            files.push(TensorFile {
                name: name.clone(),
                about: header.metadata().clone(),
            });
        }
        Ok(Self {
            place: place.to_path_buf(),
            files,
            tensors,
            about: maps.about,
        })
    }
}

/// The files of a checkpoint, mapped into memory: what is not read costs none.
pub(super) struct Maps {
    pub folder: PathBuf,
    files: Vec<(String, Mmap)>,
    about: Map<String, Value>,
}

impl Maps {
    pub fn open(place: &Path) -> Result<Self, ImportError> {
        let folder = readable(place);
        let (names, about) = match folder.join(SINGLE).is_file() {
            true => (BTreeSet::from([SINGLE.to_owned()]), Map::new()),
            false => index(&folder)?,
        };
        let files = names.into_iter().map(|name| {
            let map = map(&folder.join(&name))?;
            Ok((name, map))
        });
        Ok(Self {
            files: files.collect::<Result<_, _>>()?,
            folder,
            about,
        })
    }

    /// The tensors of each file.
    pub fn read(&self) -> Result<Vec<SafeTensors<'_>>, ImportError> {
        let read = self.files.iter().map(|(name, map)| {
            let file = SafeTensors::deserialize(map);
            file.map_err(|error| cut(&self.folder.join(name), error))
        });
        read.collect()
    }
}

fn cut(path: &Path, error: SafeTensorError) -> ImportError {
    let why = format!("it is no whole safetensors file: {error}; get it again");
    ImportError::file(path, why)
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: Map<String, Value>,
    weight_map: BTreeMap<String, String>,
}

/// The files that an index names, and what else it says.
fn index(folder: &Path) -> Result<(BTreeSet<String>, Map<String, Value>), ImportError> {
    let path = folder.join(INDEX);
    if !path.is_file() {
        let why = format!("it has no {SINGLE} and no {INDEX}; save the checkpoint as safetensors");
        return Err(ImportError::file(folder, why));
    }
    let text = fs::read(&path).map_err(|error| ImportError::file(&path, error))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| ImportError::file(&path, error))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    match names
        .iter()
        .find(|name| Path::new(name).file_name() != Some(name.as_ref()))
    {
        Some(name) => Err(ImportError::file(
            &path,
            format!("{name:?} is no name of a file; a checkpoint's files are in its folder"),
        )),
        None => Ok((names, index.metadata)),
    }
}

fn map(path: &Path) -> Result<Mmap, ImportError> {
    let file = File::open(path).map_err(|error| ImportError::file(path, error))?;
    // SAFETY: it is only read, and no one may change the files of a checkpoint while it is opened or loaded.
    unsafe { Mmap::map(&file) }.map_err(|error| ImportError::file(path, error))
}
