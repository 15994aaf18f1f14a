//! Trains attention over space and time, a video's tokens changing hands between the two.

use std::process::ExitCode;

use burn_sp_examples::RunError;
use burn_sp_examples::flags;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::spatial_temporal::{SpatialTemporalFlags, train};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run() -> Result<(), RunError> {
    let flags: SpatialTemporalFlags = flags::parse(std::env::args_os())?;
    let (file, report) = (flags.run.config.clone(), flags.run.report.clone());
    let mut flags = flags::with_file(flags, file.as_deref())?;
    flags.run.report = report;
    let config = flags.resolve()?;

    let outcome = train(&config, &Progress::new(config.run.steps))?;
    println!("{}", outcome.summary());
    if let Some(file) = &flags.run.report {
        outcome.report.write(file)?;
        eprintln!("report: {}", file.display());
    }
    Ok(())
}
