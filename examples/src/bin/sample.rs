//! Goes on from a prompt with a language model, the prompt's tokens and the cache split over ranks.

use std::process::ExitCode;

use burn_sp_examples::flags;
use burn_sp_examples::report::leave;
use burn_sp_examples::sample::{SampleFlags, sample};
use burn_sp_examples::{RunError, exit};

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: SampleFlags = flags::parse(std::env::args_os())?;
    let mut run = flags.run();
    let here = run.this_process()?;
    let config = flags.resolve(&run)?;
    if here.speaks() {
        eprintln!("mesh: {}", config.mesh());
    }
    let outcome = sample(config, &mut std::io::stdout())?;
    if !here.speaks() {
        return Ok(());
    }
    eprintln!("{}", outcome.summary());
    leave(&outcome, flags.report.as_deref())
}
