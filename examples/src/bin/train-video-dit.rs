//! Trains a causal video transformer on clips, their frames split over ranks, and samples from it.

use std::process::ExitCode;

use burn_sp_examples::flags;
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::leave;
use burn_sp_examples::train_video::{VideoTrainFlags, train};
use burn_sp_examples::{RunError, exit, summary::summary, trace::traced};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: VideoTrainFlags = flags::read()?;
    let config = flags.resolve()?;

    traced(flags.run.trace.as_deref(), || {
        let outcome = train(&config, &Progress::new(config.run.steps))?;
        println!("{}", summary(&outcome));
        leave(&outcome, flags.run.report.as_deref())
    })
}
