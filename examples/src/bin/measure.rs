//! Measures one training with sequence parallelism off and on.

use std::process::ExitCode;

use burn_sp_examples::flags;
use burn_sp_examples::measure::{MeasureFlags, measure, table, write_page};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::leave;
use burn_sp_examples::{RunError, exit, trace::traced};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: MeasureFlags = flags::read()?;
    flags.train.run.threads_only("measure")?;
    let config = flags.resolve()?;

    traced(flags.train.run.trace.as_deref(), || {
        let measurement = measure(&config, Progress::new)?;
        println!("{}", table(&measurement));
        write_page(&measurement, &config.page)?;
        eprintln!(
            "page: {} (a browser shows it, also without a network)",
            config.page.display()
        );
        leave(&measurement, flags.train.run.report.as_deref())
    })
}
