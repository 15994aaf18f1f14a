//! Collectives of the mpi engine against the same calls made on the MPI library itself, with plain buffers.
//!
//! 64 MiB of f32 on 4 processes of this host. The library's call gets buffers that are made once and used again and
//! again; the engine's makes its result anew, has compared what everyone called, and adds sums up in rank order. Both
//! take turns within one run, so both see the same machine; the table has the medians, and the ratio (library over
//! engine, better when larger).
//!
//! The library's all-to-all moves rows. Where tokens are exchanged for heads, whoever calls the library must lay them in a
//! row before, or out of it after; the engine does so itself, and is compared with both steps. One in which its boxes lie
//! in a row anyway is beside it.
//!
//! Starts itself under `mpirun`.

use burn_sp_comm::engines::mpi::{MpiConfig, launch};
use burn_sp_comm::{Buffer, Collective, Communicator, Parts, Site, Transfer, raise};
use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::CommunicatorCollectives;
use std::hint::black_box;
use std::time::{Duration, Instant};

// The allocator of the examples: results of this size are what an allocator's policy matters for.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RANKS: usize = 4;
const ROUNDS: usize = 30;
/// Tokens, heads, elements of a head: 64 MiB.
const SHAPE: [usize; 3] = [8192, 16, 128];
const ROW: usize = SHAPE[1] * SHAPE[2];

/// What is measured: the engine's operation, its input's shape, and the library's call.
struct Case {
    name: &'static str,
    op: Collective,
    shape: Vec<usize>,
    direct: fn(&SimpleCommunicator, &[f32], &mut [f32]),
}

fn cases() -> Vec<Case> {
    let (tokens, heads) = (Parts::contiguous(SHAPE[0], RANKS), Parts::contiguous(SHAPE[1], RANKS));
    let slice = vec![SHAPE[0] / RANKS, SHAPE[1], SHAPE[2]];
    let gather = |comm: &SimpleCommunicator, from: &[f32], to: &mut [f32]| comm.all_gather_into(from, to);
    let scatter = |comm: &SimpleCommunicator, from: &[f32], to: &mut [f32]| {
        comm.reduce_scatter_block_into(from, to, SystemOperation::sum());
    };
    let exchange = |comm: &SimpleCommunicator, from: &[f32], to: &mut [f32]| comm.all_to_all_into(from, to);
    let to_heads = |comm: &SimpleCommunicator, from: &[f32], to: &mut [f32]| {
        let mut packed = Vec::with_capacity(from.len());
        for rank in 0..RANKS {
            let heads = from
                .chunks_exact(ROW)
                .map(|token| &token[rank * ROW / RANKS..(rank + 1) * ROW / RANKS]);
            heads.for_each(|heads| packed.extend_from_slice(heads));
        }
        comm.all_to_all_into(&packed[..], to);
    };
    let to_tokens = |comm: &SimpleCommunicator, from: &[f32], to: &mut [f32]| {
        let mut received = vec![0.0f32; from.len()];
        comm.all_to_all_into(from, &mut received[..]);
        for (rank, heads) in received.chunks_exact(from.len() / RANKS).enumerate() {
            for (token, heads) in to.chunks_exact_mut(ROW).zip(heads.chunks_exact(ROW / RANKS)) {
                token[rank * ROW / RANKS..(rank + 1) * ROW / RANKS].copy_from_slice(heads);
            }
        }
    };
    let reduce = |comm: &SimpleCommunicator, from: &[f32], to: &mut [f32]| {
        comm.all_reduce_into(from, to, SystemOperation::sum());
    };
    // Rank by rank, a quarter of what everyone has.
    let quarters = |mine: usize| {
        let length = SHAPE[0] / RANKS / RANKS;
        let of = |rank: usize, other: usize| (rank * RANKS + other) * length..(rank * RANKS + other + 1) * length;
        let part = |rank: usize, other: usize| if mine == 0 { of(rank, other) } else { of(other, rank) };
        let parts = |rank: usize| (0..RANKS).map(|other| part(rank, other)).collect();
        Parts::new((0..RANKS).map(parts).collect())
    };
    vec![
        Case {
            name: "all_gather",
            op: Collective::AllGather {
                dim: 0,
                parts: tokens.clone(),
            },
            shape: slice.clone(),
            direct: gather,
        },
        Case {
            name: "reduce_scatter",
            op: Collective::ReduceScatter {
                dim: 0,
                parts: tokens.clone(),
            },
            shape: SHAPE.to_vec(),
            direct: scatter,
        },
        Case {
            name: "all_to_all, rows",
            op: Collective::AllToAll {
                gather_dim: 0,
                gather_parts: quarters(0),
                scatter_dim: 0,
                scatter_parts: quarters(1),
            },
            shape: slice.clone(),
            direct: exchange,
        },
        Case {
            name: "all_to_all, to heads",
            op: Collective::AllToAll {
                gather_dim: 0,
                gather_parts: tokens.clone(),
                scatter_dim: 1,
                scatter_parts: heads.clone(),
            },
            shape: slice,
            direct: to_heads,
        },
        Case {
            name: "all_to_all, to tokens",
            op: Collective::AllToAll {
                gather_dim: 1,
                gather_parts: heads,
                scatter_dim: 0,
                scatter_parts: tokens,
            },
            shape: vec![SHAPE[0], SHAPE[1] / RANKS, SHAPE[2]],
            direct: to_tokens,
        },
        Case {
            name: "all_reduce",
            op: Collective::AllReduce,
            shape: SHAPE.to_vec(),
            direct: reduce,
        },
    ]
}

fn main() {
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").is_none() {
        let status = std::process::Command::new("mpirun")
            .args(["--oversubscribe", "--bind-to", "none", "-n", &RANKS.to_string()])
            // Open MPI refuses root, as whom containers run, unless both are set.
            .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
            .arg(std::env::current_exe().expect("the benchmark has a path"))
            .args(std::env::args_os().skip(1))
            .status()
            .expect("mpirun is installed");
        std::process::exit(status.code().unwrap_or(1));
    }
    let filter = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'))
        .unwrap_or_default();
    let measured = launch(&MpiConfig::default(), |comm| {
        let cases = cases().into_iter().filter(|case| case.name.contains(&filter));
        cases.map(|case| (case.name, case.measure(&*comm))).collect::<Vec<_>>()
    });
    let measured = measured.unwrap_or_else(|error| panic!("{error}"));
    if std::env::var("OMPI_COMM_WORLD_RANK").as_deref() == Ok("0") {
        println!(
            "{:<24} {:>10} {:>10} {:>7}",
            "64 MiB, 4 processes", "library", "engine", "ratio"
        );
        for (name, (library, engine)) in measured {
            let (library, engine) = (1e3 * library.as_secs_f64(), 1e3 * engine.as_secs_f64());
            println!(
                "{name:<24} {library:>7.2} ms {engine:>7.2} ms {:>7.2}",
                library / engine
            );
        }
    }
}

impl Case {
    /// The medians of the library's time and the engine's.
    fn measure(&self, comm: &dyn Communicator) -> (Duration, Duration) {
        let elements: usize = self.shape.iter().product();
        let input = Buffer::from_slice(&vec![1.0f32; elements], self.shape.clone());
        let engine = || {
            let transfer = Transfer {
                op: self.op.clone(),
                buffer: input.clone(),
            };
            comm.run(vec![transfer], Site::here())
                .unwrap_or_else(|error| raise(error))
        };
        let world = SimpleCommunicator::world();
        let from = vec![1.0f32; elements];
        let mut to = vec![0.0f32; engine()[0].num_elements()];
        let mut times = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            times
                .0
                .push(time(comm, || (self.direct)(&world, &from, black_box(&mut to))));
            times.1.push(time(comm, || drop(black_box(engine()))));
        }
        (median(times.0), median(times.1))
    }
}

/// From a common start until all are done.
fn time(comm: &dyn Communicator, work: impl FnOnce()) -> Duration {
    comm.barrier().unwrap_or_else(|error| raise(error));
    let begin = Instant::now();
    work();
    comm.barrier().unwrap_or_else(|error| raise(error));
    begin.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
