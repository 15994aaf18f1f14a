//! Flags, checked and completed: what a run needs, and nothing that cannot work.

mod data;
mod learning;
mod pretrained;
mod run;
mod state;
mod train;

pub use data::DataConfig;
pub use learning::LearningConfig;
pub use run::{RunConfig, ThisProcess};
pub use state::StateConfig;
pub use train::TrainConfig;

use std::fmt::Display;
use std::path::Path;

use crate::InputError;

/// Of a sequence, 2^27: choosing a mesh asks the mask about each of them, which takes a second for so many.
pub(crate) const MAX_TOKENS: usize = 1 << 27;

/// Byte-level: every value of a byte is a token.
pub(crate) const BYTES: usize = 256;

pub(crate) fn refuse<T>(line: impl Display) -> Result<T, InputError> {
    Err(InputError(line.to_string()))
}

/// The value of a flag that must not be 0.
pub(crate) fn at_least_one(flag: &str, value: Option<usize>, default: usize) -> Result<usize, InputError> {
    match value {
        Some(0) => refuse(format!("{flag} 0: give it at least 1, or leave it out for {default}")),
        value => Ok(value.unwrap_or(default)),
    }
}

/// What cannot be written should be known before the run, not after it.
pub(crate) fn check_output(flag: &str, file: Option<&Path>) -> Result<(), InputError> {
    let Some(file) = file else { return Ok(()) };
    check_above(flag, file)?;
    if file.is_dir() {
        return refuse(format!(
            "{flag} {}: that is a folder; name a file in it",
            file.display()
        ));
    }
    Ok(())
}

/// The same of a folder that will be made.
pub(crate) fn check_folder(flag: &str, folder: &Path) -> Result<(), InputError> {
    let shown = folder.display();
    if folder.exists() && !folder.is_dir() {
        return refuse(format!("{flag} {shown}: that is a file; name a folder"));
    }
    check_above(flag, folder)
}

/// The folder in which it will be is there.
fn check_above(flag: &str, path: &Path) -> Result<(), InputError> {
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    match above.filter(|above| !above.is_dir()) {
        Some(above) => refuse(format!(
            "{flag} {}: {} is no folder; make it first",
            path.display(),
            above.display()
        )),
        None => Ok(()),
    }
}
