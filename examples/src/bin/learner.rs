//! Trains a small transformer by Burn's own training loop, its sequences split over ranks.

use std::process::ExitCode;

use burn_sp_examples::flags;
use burn_sp_examples::learner::{LearnerFlags, train};
use burn_sp_examples::{RunError, exit};

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let mut flags: LearnerFlags = flags::read()?;
    // Asked for its checks: Burn's loop is silent by itself where it must be.
    flags.run.this_process()?;
    train(&flags.resolve()?)
}
