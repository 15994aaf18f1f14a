//! Trains a byte-level language model on text, its sequences split over ranks.

use std::process::ExitCode;

use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::{RunError, exit, summary::summary, train::train};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    // A driver's loader complains of what is missing, and then the program does, in one line.
    let levels = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("wgpu_hal", LevelFilter::OFF);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines).with(levels).init();
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: TrainFlags = flags::read()?;
    let config = flags.resolve()?;

    let outcome = train(&config, &Progress::new(config.run.steps))?;
    println!("{}", summary(&outcome));
    if let Some(file) = &flags.run.report {
        outcome.write(file)?;
        eprintln!("report: {}", file.display());
    }
    Ok(())
}
