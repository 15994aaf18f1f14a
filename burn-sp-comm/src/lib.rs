#![doc = include_str!("../README.md")]
//!
//! # How the crate is cut
//!
//! | module | idea |
//! |---|---|
//! | [`parts`] | who owns which ranges of a dimension |
//! | [`collective`] | what a collective does with one tensor |
//! | [`buffer`] | one tensor: strided bytes, or a tensor on a device; shared rather than copied |
//! | [`device`] | what an engine asks of a tensor on a device |
//! | [`plan`] | a collective as a table: which box of which rank goes where |
//! | [`communicator`] | the object-safe trait that every engine implements |
//! | [`engines`] | engines: ranks as threads of one process, as processes over MPI, as CUDA devices over NCCL |
//! | [`error`] | the report that every rank gets when one of them fails |
//! | [`stats`] | calls, bytes and seconds per operation and axis |

pub mod buffer;
pub mod collective;
pub mod communicator;
mod copy;
pub mod device;
pub mod engines;
pub mod error;
#[cfg(any(test, feature = "processes"))]
mod exchange;
pub mod parts;
pub mod plan;
mod span;
pub mod stats;
mod sum;

// The tests' oracle, which unit tests share, calls the crate by its name.
#[cfg(all(test, feature = "nccl"))]
extern crate self as burn_sp_comm;

pub use buffer::Buffer;
pub use collective::Collective;
pub use communicator::{Communicator, Pending, Site, Transfer};
pub use device::{CudaOrder, CudaTensor, CudaWork, DeviceTensor};
pub use error::{CommError, raise};
pub use parts::Parts;
pub use plan::Plan;
pub use stats::Counter;
