//! Trains a language model on text, its sequences split over ranks.

use std::process::ExitCode;

use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::report::leave;
use burn_sp_examples::{RunError, exit, summary::summary, trace::traced, train::train};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let mut flags: TrainFlags = flags::read()?;
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
