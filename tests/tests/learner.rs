//! Burn's own training loop over a mesh: what it logs, when it stops, and what its checkpoints hold.

mod common;
mod learner {
    mod checkpoints;
    mod data;
    mod ending;
    mod floats;
    mod losses;
    mod metrics;
    mod model;
    mod run;
    mod slow;
}
