//! Says what fits into the memory of a rank, and what to choose.

use std::process::ExitCode;

use burn_sp_examples::flags::{self, RunFlags};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::plan::{PlanFlags, check, check_table, plan_table, recommendation, ways};
use burn_sp_examples::report::leave;
use burn_sp_examples::{InputError, RunError, exit, trace::traced};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: PlanFlags = flags::read()?;
    flags.train.run.threads_only("plan")?;
    flags.train.state.refuse("plan")?;
    let RunFlags { report, trace, .. } = &flags.train.run;
    if !flags.check {
        if let Some(file) = trace {
            let line = format!(
                "--trace {}: nothing runs without --check; leave one out or add the other",
                file.display()
            );
            return Err(InputError(line).into());
        }
        let ways = ways(&flags)?;
        println!("{}", plan_table(&ways, flags.all));
        println!("{}", recommendation(&ways, flags.budget()?));
        return leave(&ways, report.as_deref());
    }
    traced(trace.as_deref(), || {
        let checked = check(&flags, |case| {
            eprintln!("{}: {:+.1} %", case.config.run.mesh(), 100.0 * case.error());
        })?;
        println!("{}", check_table(&checked));
        let worst = checked.iter().map(|case| case.error().abs()).fold(0.0, f64::max);
        println!("The worst forecast of memory is off by {:.1} %.", 100.0 * worst);
        leave(&checked, report.as_deref())
    })
}
