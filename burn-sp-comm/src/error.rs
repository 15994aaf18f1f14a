//! What can go wrong between ranks.

use serde::{Deserialize, Serialize};

/// The reason why a collective, or a whole launch, failed.
///
/// When one rank fails, every rank of the world gets a clone of the *same* error, so any rank's message can be shown.
/// Reports name ranks by their global number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The ranks of a group called different collectives, or the same one with tensors that do not fit together.
    #[error("the ranks of a group disagree on the {difference}: {report}")]
    Mismatch {
        /// What differs: "operation", "parameters", "number of tensors", "dtype", "shape" or "subgroup".
        difference: String,
        /// One entry a rank: `rank 0: all_gather over ulysses [2, 3, f32] at src/a.rs:1:2; rank 1: ...`.
        report: String,
    },
    /// A rank waited longer than the timeout.
    #[error("timeout: {report}")]
    Timeout {
        /// Who waited where for whom, then what every rank of the world was last doing.
        report: String,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked{}: {message}", .location.as_ref().map(|l| format!(" at {l}")).unwrap_or_default())]
    Panic {
        /// The global rank.
        rank: usize,
        /// The panic message.
        message: String,
        /// `file:line:column`, where the panic passed through the panic hook of the rank's thread.
        location: Option<String>,
    },
    /// A rank returned while others wait for it in a collective.
    #[error("rank {rank} has returned, yet others wait for it: {report}")]
    Departed {
        /// The global rank that returned.
        rank: usize,
        /// Who waited where, then what every rank of the world was last doing.
        report: String,
    },
    /// A rank's process ended without a word: it was killed, it crashed, or its host is gone.
    #[error("rank {rank} has died: {report}")]
    Died {
        /// The global rank.
        rank: usize,
        /// What is known of the end, then what every other rank was last doing.
        report: String,
    },
    /// A rank's own code returned an error.
    #[error("rank {rank} failed: {message}")]
    Failed {
        /// The global rank.
        rank: usize,
        /// The error of the rank's code.
        message: String,
    },
    /// Bad arguments, noticed before anything was sent; only the calling rank knows of it until it raises the error.
    #[error("{message}")]
    Invalid {
        /// What is wrong, where, and what would work.
        message: String,
    },
    /// Someone gave up on purpose, through [`Communicator::abort`](crate::Communicator::abort).
    #[error("aborted: {message}")]
    Aborted {
        /// The reason given.
        message: String,
    },
}

impl CommError {
    /// [`CommError::Invalid`] with this message.
    pub fn invalid(message: impl Into<String>) -> Self {
        CommError::Invalid {
            message: message.into(),
        }
    }

    /// [`CommError::Failed`]: rank `rank` gives up because of `error`.
    pub fn failed(rank: usize, error: impl std::fmt::Display) -> Self {
        CommError::Failed {
            rank,
            message: error.to_string(),
        }
    }
}

/// Panics with `error` as the payload and without calling the panic hook, so nothing is printed.
///
/// Use it where a function cannot return an error, such as the backward step of an autodiff node:
/// [`launch`](crate::engines::threads::launch) turns the payload back into `Err(error)`, on every rank.
pub fn raise(error: CommError) -> ! {
    std::panic::resume_unwind(Box::new(error))
}
