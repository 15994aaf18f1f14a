//! Ways for ranks to reach each other: one folder an engine, and what they have in common.

pub(crate) mod shared;
pub mod threads;
