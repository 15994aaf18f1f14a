//! Ranks as processes over MPI: the losses of ranks as threads, to the bit; and whatever happens to one process, the
//! others say so and end.
//!
//! `BURN_SP_FAULTS=50` runs every fault so many times.

mod faults;
mod learner;
mod losses;
mod run;
mod saves;

use std::path::Path;
use std::process::Command;

use run::{PATIENCE, PROGRAM, Run, TINY, as_threads, folder, moment, rounds, text};

impl Run {
    /// `train-transformer --engine mpi` with these flags, on this host.
    fn start(folder: &Path, ranks: usize, flags: &str) -> Run {
        Run::start_with(folder, ranks, flags, "")
    }

    /// The same, each process after some lines of a shell: see [`Run::under`].
    fn start_with(folder: &Path, ranks: usize, flags: &str, lines: &str) -> Run {
        Run::under(Command::new("mpirun"), folder, ranks, flags, lines)
    }
}
