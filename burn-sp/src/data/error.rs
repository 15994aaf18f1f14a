use std::ops::Range;
use std::path::Path;

/// Why a file of tokens cannot be written or read. Each is one line: what, where, and what would work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// A file could not be read.
    #[error("{path} could not be read: {why}")]
    Read {
        /// The file.
        path: String,
        /// The system's reason.
        why: String,
    },
    /// A file could not be written.
    #[error("{path} could not be written: {why}")]
    Write {
        /// The file.
        path: String,
        /// The system's reason.
        why: String,
    },
    /// The file is something else.
    #[error("{path} is no file of tokens; name one that TokenWriter wrote")]
    Foreign {
        /// The file.
        path: String,
    },
    /// The file is of another format.
    #[error("{path} is of format version {found}, this program reads version {reads}; make it again from its text")]
    Version {
        /// The file.
        path: String,
        /// Its version.
        found: u32,
        /// The version that can be read.
        reads: u32,
    },
    /// The file is not what was written.
    #[error("{path} is damaged: {what}; make it again from its text")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong with it.
        what: String,
    },
    /// A token is beyond the vocabulary.
    #[error("{path}: token {id} is not below the vocabulary's size, {vocabulary}")]
    Id {
        /// The file.
        path: String,
        /// The token.
        id: u32,
        /// Entries of the vocabulary.
        vocabulary: u64,
    },
    /// There are no such tokens.
    #[error("{path} holds {tokens} tokens, and {} to {} were asked for", .asked.start, .asked.end)]
    Window {
        /// The file.
        path: String,
        /// What was asked for.
        asked: Range<u64>,
        /// How many tokens there are.
        tokens: u64,
    },
}

impl TokenError {
    pub(super) fn read(path: &Path) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.display().to_string();
        move |error| TokenError::Read {
            path: path.clone(),
            why: error.to_string(),
        }
    }

    pub(super) fn write(path: &Path) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.display().to_string();
        move |error| TokenError::Write {
            path: path.clone(),
            why: error.to_string(),
        }
    }
}
