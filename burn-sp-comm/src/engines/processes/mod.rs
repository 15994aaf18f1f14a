//! What engines with a process a rank have in common: a line of every process to a hub, beside the one that tensors
//! take.
//!
//! The hub is a thread of rank 0. Over the lines, which are TCP connections, go failures (one for all ranks: the first),
//! questions what everyone was last doing, and farewells. A line that closes without a farewell is a process that has
//! died. No collective waits for the hub, so a healthy run does not notice it.

mod control;
#[cfg(feature = "nccl")]
mod environment;
mod gate;
mod hub;
#[cfg(feature = "nccl")]
mod rendezvous;
mod run;
mod signals;
mod wire;
#[cfg(feature = "nccl")]
mod words;
mod world;

pub(crate) use control::Control;
#[cfg(feature = "nccl")]
pub(crate) use environment::Environment;
pub(crate) use hub::{Address, Hub};
#[cfg(feature = "nccl")]
pub(crate) use rendezvous::{Door, find};
pub(crate) use run::run;
pub(crate) use signals::{Reported, report_on};
#[cfg(feature = "nccl")]
pub(crate) use wire::Compared;
pub(crate) use world::{Group, Groups, ProcessWorld};
