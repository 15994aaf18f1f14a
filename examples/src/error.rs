use std::path::PathBuf;
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
    /// The run is over, but its report could not be written.
    #[error("--report {}: {source}", path.display())]
    Report {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The runs are over, but their page could not be written.
    #[error("--page {}: {source}", path.display())]
    Page {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The run is over, but its timeline could not be written.
    #[error("--trace {}: {source}", path.display())]
    Trace {
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
    /// What the process ends with: 2 for bad input, 1 for a run that failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Input(_) => 2,
            RunError::Ranks(_) | RunError::Report { .. } | RunError::Page { .. } | RunError::Trace { .. } => 1,
        }
    }
}
