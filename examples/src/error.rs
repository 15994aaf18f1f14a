use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Input that cannot work, noticed before any rank starts: what, where, and what would work, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InputError(pub String);

/// Why a program ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Bad input; no rank has started.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The ranks failed; all of them with this report.
    #[error(transparent)]
    Ranks(#[from] burn_sp::Error),
    /// The work is over, but what a flag asked for could not be written.
    #[error("{flag} {}: {source}", path.display())]
    Output {
        /// The flag.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// How a program ends: an error is one line on stderr, and in the exit code.
pub fn exit(outcome: Result<(), RunError>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

impl RunError {
    /// What becomes of an error in writing the file of a flag.
    pub(crate) fn output(flag: &'static str, file: &Path) -> impl Fn(std::io::Error) -> Self {
        let path = file.to_path_buf();
        move |source| RunError::Output {
            flag,
            path: path.clone(),
            source,
        }
    }

    /// What the process ends with: 2 for bad input, 1 for a run that failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Input(_) => 2,
            RunError::Ranks(_) | RunError::Output { .. } => 1,
        }
    }
}
