use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::files::{INDEX, SINGLE};
use crate::import::ImportError;

/// What describes a model beside its tensors.
pub(super) const CONFIG: &str = "config.json";

/// What goes along with a model: its tokenizer, and how it generates.
const TOKENIZER: &str = "tokenizer.json";
const ALONG: [&str; 12] = [
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
];

/// A folder that goes along: a file for each chat template but the first.
const TEMPLATES: &str = "additional_chat_templates";

/// The ends of the names that a checkpoint has for a moment, with a dot before its own: while it is written, and while the
/// next one takes its place.
const DRAFT: &str = ".tmp";
const ASIDE: &str = ".old";

/// A checkpoint that is being written, beside its place and under a name of its own.
pub(super) struct Draft {
    folder: PathBuf,
    place: PathBuf,
    /// Where the checkpoint that was there is for the moment between two renames.
    aside: PathBuf,
}

impl Draft {
    /// Begins, if there is nothing in the place or a checkpoint and nothing else.
    pub fn begin(place: &Path) -> Result<Self, ImportError> {
        let real = real(place)?;
        let (Some(folder), Some(aside)) = (beside(&real, DRAFT), beside(&real, ASIDE)) else {
            return Err(ImportError::file(place, "it is no name of a folder; name one"));
        };
        let draft = Self {
            folder,
            aside,
            place: real,
        };
        // The process of an earlier save ended in that moment.
        if draft.aside.exists() && !draft.place.exists() {
            rename(&draft.aside, &draft.place)?;
        }
        check(place)?;
        remove(&draft.folder)?;
        remove(&draft.aside)?;
        fs::create_dir_all(&draft.folder).map_err(|error| ImportError::file(&draft.folder, error))?;
        Ok(draft)
    }

    /// Where a file is while it is written.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), ImportError> {
        let path = self.path(name);
        let mut file = File::create(&path).map_err(|error| ImportError::file(&path, error))?;
        file.write_all(bytes)
            .and_then(|()| file.sync_all())
            .map_err(|error| ImportError::file(&path, error))
    }

    /// Takes along what belongs to the model beside its tensors, from its folder or from the checkpoint that is replaced;
    /// the tokenizer from this file, if one is given.
    pub fn take_along(&self, from: Option<&Path>, tokenizer: Option<&Path>) -> Result<(), ImportError> {
        let from = from.map(readable).into_iter().chain([self.place.clone()]);
        let from: Vec<PathBuf> = from.collect();
        for name in ALONG {
            let mut found = from.iter().map(|folder| folder.join(name));
            let path = match tokenizer {
                Some(own) if name == TOKENIZER => Some(own.to_path_buf()),
                _ => found.find(|path| path.is_file()),
            };
            if let Some(path) = path {
                self.copy(&path, name)?;
            }
        }
        let mut templates = from.iter().map(|folder| folder.join(TEMPLATES));
        if let Some(templates) = templates.find(|folder| folder.is_dir()) {
            let own = self.path(TEMPLATES);
            fs::create_dir(&own).map_err(|error| ImportError::file(&own, error))?;
            for name in names(&templates)? {
                self.copy(&templates.join(&name), &format!("{TEMPLATES}/{name}"))?;
            }
            sync(&own)?;
        }
        Ok(())
    }

    fn copy(&self, from: &Path, name: &str) -> Result<(), ImportError> {
        let bytes = fs::read(from).map_err(|error| ImportError::file(from, error))?;
        self.write(name, &bytes)
    }

    /// Puts it in its place.
    pub fn publish(&self) -> Result<(), ImportError> {
        sync(&self.folder)?;
        if self.place.exists() {
            rename(&self.place, &self.aside)?;
        }
        if let Err(error) = rename(&self.folder, &self.place) {
            if self.aside.exists() {
                rename(&self.aside, &self.place)?;
            }
            return Err(error);
        }
        match self.place.parent() {
            Some(parent) if parent != Path::new("") => sync(parent)?,
            _ => sync(Path::new("."))?,
        }
        remove(&self.aside)
    }

    /// Leaves nothing of it, after a failure.
    pub fn discard(&self) {
        if let Err(left) = remove(&self.folder) {
            tracing::warn!("it is left, until the next save: {left}");
        }
    }
}

/// The folder in which the checkpoint of a place is: beside it, if a save ended in the moment between two renames.
pub(super) fn readable(place: &Path) -> PathBuf {
    let aside = || beside(&real(place).ok()?, ASIDE).filter(|aside| aside.is_dir());
    match place.exists() {
        true => place.to_path_buf(),
        false => aside().unwrap_or_else(|| place.to_path_buf()),
    }
}

/// The folder that a place is: a link is never replaced, but what it names, which need not be there.
fn real(place: &Path) -> Result<PathBuf, ImportError> {
    if place.exists() {
        return fs::canonicalize(place).map_err(|error| ImportError::file(place, error));
    }
    // Without a slash at the end, behind which a link would be followed.
    let mut real: PathBuf = place.components().collect();
    // Linux follows no more.
    for _ in 0..40 {
        match (fs::read_link(&real), real.parent()) {
            (Ok(target), Some(parent)) => real = parent.join(target),
            _ => return Ok(real),
        }
    }
    Err(ImportError::file(place, "it is a link to itself; name a folder"))
}

/// What a folder has for a moment beside it.
fn beside(folder: &Path, end: &str) -> Option<PathBuf> {
    let name = folder.file_name()?;
    Some(folder.with_file_name(format!(".{}{end}", name.display())))
}

/// Refuses a folder in which anything would be lost.
pub(super) fn check(place: &Path) -> Result<(), ImportError> {
    if !place.exists() {
        return Ok(());
    }
    let refuse = |what: String| {
        let why = format!("{what}, so it is not only a checkpoint and is not replaced; save elsewhere");
        Err(ImportError::file(place, why))
    };
    let names = names(place)?;
    let is_known = |name: &&String| match name.as_str() {
        TEMPLATES => only_templates(&place.join(name)),
        name => name == CONFIG || ALONG.contains(&name) || is_of_tensors(name),
    };
    if let Some(other) = names.iter().find(|name| !is_known(name)) {
        return refuse(format!("it has {other}"));
    }
    let has_config = names.iter().any(|name| name == CONFIG);
    if !names.is_empty() && !has_config {
        return refuse(format!("it has files but no {CONFIG}"));
    }
    match !has_config || names.iter().any(|name| is_of_tensors(name)) || is_of_model(&place.join(CONFIG)) {
        true => Ok(()),
        false => refuse(format!("it has no tensors, and {CONFIG} names no model_type")),
    }
}

/// The tensors, all or some (`model-00001-of-00002.safetensors`), or their index.
fn is_of_tensors(name: &str) -> bool {
    [SINGLE, INDEX].contains(&name) || (name.starts_with("model-") && name.ends_with(".safetensors"))
}

/// Whether a configuration is one of a model, whichever.
fn is_of_model(config: &Path) -> bool {
    let settings = fs::read(config)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    settings.is_some_and(|settings: Value| settings["model_type"].is_string())
}

fn only_templates(folder: &Path) -> bool {
    names(folder).is_ok_and(|names| names.iter().all(|name| name.ends_with(".jinja")))
}

/// The names of what is in a folder.
fn names(folder: &Path) -> Result<Vec<String>, ImportError> {
    let failed = |error| ImportError::file(folder, error);
    let entries = fs::read_dir(folder).map_err(failed)?;
    let names = entries.map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

fn rename(from: &Path, to: &Path) -> Result<(), ImportError> {
    fs::rename(from, to).map_err(|error| ImportError::file(to, error))
}

fn remove(folder: &Path) -> Result<(), ImportError> {
    match folder.exists() {
        true => fs::remove_dir_all(folder).map_err(|error| ImportError::file(folder, error)),
        false => Ok(()),
    }
}

/// Brings the names in a folder to the disk, where the system can.
fn sync(folder: &Path) -> Result<(), ImportError> {
    match cfg!(unix) {
        true => File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| ImportError::file(folder, error)),
        false => Ok(()),
    }
}
