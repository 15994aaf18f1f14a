//! Fused attention on Flex against fixtures made with PyTorch, exact oracles and an independent f64 computation.

#[path = "attention/accuracy.rs"]
mod accuracy;
#[path = "attention/dropout.rs"]
mod dropout;
#[path = "attention/fixtures.rs"]
mod fixtures;
#[path = "attention/invariants.rs"]
mod invariants;
#[path = "attention/masks.rs"]
mod masks;
#[path = "attention/merging.rs"]
mod merging;
#[path = "attention/nan.rs"]
mod nan;
#[path = "attention/refusals.rs"]
mod refusals;
#[path = "attention/support.rs"]
mod support;
