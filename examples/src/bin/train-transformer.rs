//! Trains a byte-level language model on text, its sequences split over ranks.

use std::process::ExitCode;

use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::leave;
use burn_sp_examples::{RunError, exit, summary::summary, trace::traced, train::train};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: TrainFlags = flags::read()?;
    let config = flags.resolve()?;

    traced(flags.run.trace.as_deref(), || {
        let outcome = train(&config, &Progress::new(config.run.steps))?;
        println!("{}", summary(&outcome));
        leave(&outcome, flags.run.report.as_deref())
    })
}
