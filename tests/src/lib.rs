#![doc = include_str!("../README.md")]

mod cast;
mod compare;
mod diagnosis;
mod difference;
mod fixtures;
mod judge;
mod outcome;
mod run;
mod values;

pub use cast::{cast, dtype_of};
pub use compare::Comparison;
pub use diagnosis::{Diagnosis, FaultKind};
pub use difference::{Deviation, Difference, Entry, Quantity, Report};
pub use fixtures::Fixture;
pub use outcome::{Outcome, Rank};
pub use values::{Values, gather_gradients, gradients_by_path, parameters_by_path};

/// The workspace's README, so that its example is tested.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
