//! Trains a causal video transformer on clips, their frames split over ranks, and samples from it.

use std::process::ExitCode;

use burn_sp_examples::flags;
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::report::leave;
use burn_sp_examples::train_video::{VideoTrainFlags, train};
use burn_sp_examples::{RunError, exit, summary::summary, trace::traced};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let mut flags: VideoTrainFlags = flags::read()?;
    let here = flags.run.this_process()?;
    let config = flags.resolve()?;

    traced(here.own_file(flags.run.trace.as_deref()).as_deref(), || {
        let outcome = train(&config, &here.progress(config.run.steps))?;
        if !here.speaks() {
            return Ok(());
        }
        println!("{}", summary(&outcome));
        leave(&outcome, flags.run.report.as_deref())
    })
}
