//! Ways for ranks to reach each other.

pub mod threads;
