//! Trains attention over space and time, a video's tokens changing hands between the two.

use std::process::ExitCode;

use burn_sp_examples::flags;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::leave;
use burn_sp_examples::spatial_temporal::{SpatialTemporalFlags, train};
use burn_sp_examples::{RunError, exit, trace::traced};

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: SpatialTemporalFlags = flags::read()?;
    flags.run.threads_only("spatial-temporal")?;
    let config = flags.resolve()?;

    traced(flags.run.trace.as_deref(), || {
        let outcome = train(&config, &Progress::new(config.run.steps))?;
        println!("{}", outcome.summary());
        leave(&outcome.report, flags.run.report.as_deref())
    })
}
