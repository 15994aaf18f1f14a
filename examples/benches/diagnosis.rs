//! What it costs that ranks compare what they call: the share of a training step, at most.
//!
//! A barrier moves no tensors: ranks exchange and compare fingerprints and wait for each other, nothing else. So a step's
//! calls, each as slow as a barrier, cost no less than its fingerprints do; all of that waiting is charged to them here.
//! The step is that of the default model of `train-transformer`, 4 ranks on the ulysses axis, measured in the same run.
//!
//! `cargo bench --workspace --bench diagnosis`, with `--features burn-sp-examples/mpi` also for ranks as processes (under an
//! `mpirun` that it starts itself). At most 2 % is the aim.

use std::ffi::OsString;
use std::time::Instant;

use burn::tensor::Device;
use burn_sp::comm::raise;
use burn_sp::{SpDevice, launch};
use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::progress::Progress;
use burn_sp_examples::train::train;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RANKS: usize = 4;
const BARRIERS: usize = 2000;

fn main() {
    let engine = std::env::args()
        .skip(1)
        .find_map(|argument| argument.strip_prefix("--engine=").map(String::from));
    match engine {
        Some(engine) => measure(&engine),
        None => {
            println!(
                "{:<8} {:>8} {:>14} {:>14} {:>10}",
                "engine", "calls", "fingerprint", "step", "share"
            );
            measure("threads");
            #[cfg(feature = "mpi")]
            under_mpirun();
            #[cfg(not(feature = "mpi"))]
            println!("mpi      skipped: built without the feature mpi");
        }
    }
}

#[cfg(feature = "mpi")]
fn under_mpirun() {
    let status = std::process::Command::new("mpirun")
        .args(["--oversubscribe", "--bind-to", "none", "-n", &RANKS.to_string()])
        // Open MPI refuses root, as whom containers run, unless both are set.
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .arg(std::env::current_exe().expect("the benchmark has a path"))
        .arg("--engine=mpi")
        .status()
        .expect("mpirun is installed");
    assert!(status.success(), "{status}");
}

fn measure(engine: &str) {
    let line = format!("train-transformer --engine {engine} --ulysses {RANKS} --steps 8");
    let flags: TrainFlags = flags::parse(line.split_whitespace().map(OsString::from)).expect("the flags are right");
    let config = flags.resolve().unwrap_or_else(|error| panic!("{error}"));
    let report = train(&config, &Progress::quiet()).unwrap_or_else(|error| panic!("{error}"));
    let first = report.communication.iter().filter(|counter| counter.rank == 0);
    let calls = first.map(|counter| counter.calls).sum::<u64>() as f64 / report.steps.len() as f64;

    let medians = launch(&config.run.launch(), &Device::flex(), |device: SpDevice| {
        let world = device.mesh().world().clone();
        let barrier = || {
            let begin = Instant::now();
            world.barrier().unwrap_or_else(|error| raise(error));
            begin.elapsed()
        };
        let mut times: Vec<_> = (0..BARRIERS).map(|_| barrier()).collect();
        times.sort_unstable();
        (device.rank(), times[times.len() / 2].as_secs_f64())
    });
    let medians = medians.unwrap_or_else(|error| panic!("{error}"));
    if let Some((_, fingerprint)) = medians.into_iter().find(|(rank, _)| *rank == 0) {
        let step = report.step_seconds_median;
        println!(
            "{engine:<8} {calls:>8.0} {:>11.1} us {:>11.1} ms {:>8.2} %",
            1e6 * fingerprint,
            1e3 * step,
            100.0 * calls * fingerprint / step
        );
    }
}
