//! The files of a text: which they are, and how they are known again without being read.

use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{self, Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::InputError;
use crate::fnv::Fnv;

/// A file that was found.
pub(crate) struct Found {
    pub path: PathBuf,
    /// Whether it was named itself, and not a folder that it is in.
    pub named: bool,
}

/// What was found under some paths.
#[derive(Default)]
pub(crate) struct Listing {
    pub files: Vec<Found>,
    /// In folders: links to folders, which may lead in circles, links to nothing, and what is no file.
    pub passed: usize,
}

/// What is said of a path that was given.
pub(crate) fn wrong(path: &Path, error: impl Display) -> InputError {
    InputError(format!("--text {}: {error}", path.display()))
}

/// What was passed over, in a few words: files that are no text, and what is no file.
pub(crate) fn passed_over(foreign: usize, passed: usize) -> String {
    let said = |count: usize, why: &str| match count {
        0 => String::new(),
        _ => format!(", {count} passed over ({why})"),
    };
    said(foreign, "not UTF-8") + &said(passed, "links to folders, or no files")
}

/// Whether both are one file or folder.
pub(crate) fn same(one: &Path, other: &Path) -> bool {
    match (fs::canonicalize(one), fs::canonicalize(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}

impl Listing {
    /// The files, and those in folders, in the order of their names; hidden ones and `target/` are left out. With no paths:
    /// this workspace's sources and documentation.
    ///
    /// # Errors
    /// If a folder cannot be read, or a path is neither a file nor a folder.
    pub fn of(paths: Option<&[PathBuf]>) -> Result<Self, InputError> {
        let mut listing = Self::default();
        match paths {
            Some(paths) => {
                for path in paths {
                    listing.add_named(path)?;
                }
            }
            None => {
                let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
                let wanted = |path: &Path| {
                    let extension = path.extension().and_then(|extension| extension.to_str());
                    matches!(extension, Some("rs" | "md" | "toml"))
                };
                listing.add_folder(&workspace, &wanted).map_err(|InputError(line)| {
                    InputError(format!(
                        "the sources that this program was built from are gone ({line}); give --text PATH"
                    ))
                })?;
            }
        }
        Ok(listing)
    }

    fn add_named(&mut self, path: &Path) -> Result<(), InputError> {
        let found = fs::metadata(path).map_err(|error| wrong(path, error))?;
        if found.is_dir() {
            return self.add_folder(path, &|_| true);
        }
        // A pipe could be read only once.
        if !found.is_file() {
            return Err(wrong(path, "that is neither a file nor a folder; name one"));
        }
        let path = path.to_path_buf();
        self.files.push(Found { path, named: true });
        Ok(())
    }

    fn add_folder(&mut self, path: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<(), InputError> {
        let entries = fs::read_dir(path).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let mut entries = entries.map_err(|error| wrong(path, error))?;
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            if name.to_string_lossy().starts_with('.') || name == "target" {
                continue;
            }
            if entry.file_type().map_err(|error| wrong(&path, error))?.is_dir() {
                self.add_folder(&path, wanted)?;
            } else if wanted(&path) {
                // What a link leads to.
                match fs::metadata(&path) {
                    Ok(found) if found.is_file() => self.files.push(Found { path, named: false }),
                    Ok(_) => self.passed += 1,
                    Err(error) if error.kind() == ErrorKind::NotFound => self.passed += 1,
                    Err(error) => return Err(wrong(&path, error)),
                }
            }
        }
        Ok(())
    }

    /// Without these, unless they are named themselves: what is made of a text may lie in its folder.
    pub fn without(mut self, made: &[PathBuf]) -> Self {
        let is = |path: &Path| {
            made.iter()
                .any(|made| made.file_name() == path.file_name() && same(made, path))
        };
        self.files.retain(|Found { path, named }| *named || !is(path));
        self
    }

    /// A hash of the files' places, lengths and times of change: while it is the same, so is what they hold.
    ///
    /// # Errors
    /// If one is gone.
    pub fn digest(&self) -> Result<String, InputError> {
        let mut hash = Fnv::new();
        for Found { path, .. } in &self.files {
            let of = || -> io::Result<_> {
                let found = fs::metadata(path)?;
                Ok((path::absolute(path)?, found.len(), found.modified()?))
            };
            let (place, length, changed) = of().map_err(|error| wrong(path, error))?;
            // Before 1970 counts back.
            let changed = match changed.duration_since(UNIX_EPOCH) {
                Ok(after) => after.as_nanos() as u64,
                Err(before) => (before.duration().as_nanos() as u64).wrapping_neg(),
            };
            hash = hash.field(place.as_os_str().as_encoded_bytes());
            hash = hash.number(length).number(changed);
        }
        Ok(hash.hex())
    }
}
