//! Says what fits into the memory of a rank, and what to choose.

use std::process::ExitCode;

use burn_sp_examples::flags;
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::plan::{PlanFlags, check, check_table, plan_table, recommendation, ways};
use burn_sp_examples::report::write_json;
use burn_sp_examples::{RunError, exit};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), RunError> {
    let flags: PlanFlags = flags::read()?;
    let report = flags.train.run.report.as_deref();
    if flags.check {
        let checked = check(&flags, |case| {
            eprintln!("{}: {:+.1} %", case.config.run.mesh(), 100.0 * case.error());
        })?;
        println!("{}", check_table(&checked));
        let worst = checked.iter().map(|case| case.error().abs()).fold(0.0, f64::max);
        println!("The worst forecast of memory is off by {:.1} %.", 100.0 * worst);
        return report.map_or(Ok(()), |file| write_json(&checked, file));
    }
    let ways = ways(&flags)?;
    println!("{}", plan_table(&ways, flags.all));
    println!("{}", recommendation(&ways, flags.budget()?));
    report.map_or(Ok(()), |file| write_json(&ways, file))
}
