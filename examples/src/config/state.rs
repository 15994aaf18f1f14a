//! The flags of training state.

use std::path::PathBuf;

use super::{check_folder, refuse};
use crate::InputError;
use crate::flags::StateFlags;

/// Where training state goes and comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // They are documented where they are flags.
pub struct StateConfig {
    pub save: Option<PathBuf>,
    pub save_every: Option<usize>,
    pub resume: Option<PathBuf>,
}

impl StateFlags {
    /// Checks the flags, all but the states themselves; the folder only where this process is the one that writes.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self, silent: bool) -> Result<StateConfig, InputError> {
        let Self {
            save,
            save_every,
            resume,
        } = self.clone();
        match (&save, save_every) {
            (_, Some(0)) => return refuse("--save-every 0: use at least 1, or leave it out for after the last step"),
            (None, Some(every)) => return refuse(format!("--save-every {every}: give --save, a folder, too")),
            _ => {}
        }
        if let Some(folder) = save.as_ref().filter(|_| !silent) {
            check_folder("--save", folder)?;
        }
        Ok(StateConfig {
            save,
            save_every,
            resume,
        })
    }

    /// For programs that train, but go on from nothing.
    ///
    /// # Errors
    /// If one of the flags is given.
    pub fn refuse(&self, program: &str) -> Result<(), InputError> {
        let given = [
            ("--save", self.save.is_some()),
            ("--save-every", self.save_every.is_some()),
            ("--resume", self.resume.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => refuse(format!("{flag}: {program} keeps no training state; leave it out")),
            None => Ok(()),
        }
    }
}
