//! Ways for ranks to reach each other: one folder an engine, and what they have in common.

#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(feature = "processes")]
pub(crate) mod processes;
pub(crate) mod shared;
pub mod threads;
