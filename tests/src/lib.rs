#![doc = include_str!("../README.md")]

mod cast;
mod compare;
mod difference;
mod fixtures;
mod outcome;
mod values;

pub use cast::{cast, dtype_of};
pub use compare::Comparison;
pub use difference::{Difference, Entry, Quantity, Report};
pub use fixtures::Fixture;
pub use outcome::{Outcome, Rank};
pub use values::{Values, gather_gradients, gradients_by_path, parameters_by_path};

/// The workspace's README, so that its example is tested.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
