//! Collectives of the threads engine against plain copies.
//!
//! The whole tensor has 64 MiB of f32. The reference: as many threads as ranks, each copying as many bytes as its
//! result has, at the same time, into memory that it allocates for this and frees again, as the collective does with
//! its result. Copy and collective alternate within one run, so both see the same machine, and the table has the
//! medians of both. Criterion reports the collective's own time.
//!
//! Two ratios, both better when larger: of times (copy over collective), and of bandwidths (collective over copy),
//! which counts the bytes that all ranks together must read and write: a reduce-scatter on P ranks reads P bytes for
//! each that it writes, a copy one; a shared result of an all-gather is written once, the copies P times.

use burn_sp_comm::engines::threads::{ThreadsConfig, launch};
use burn_sp_comm::{Buffer, Collective, CommError, Communicator, Parts, Site, Transfer, raise};
use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::sync::Mutex;
use std::time::{Duration, Instant};

// The allocator of the examples: results of this size are what an allocator's policy matters for.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// One operation on one layout.
struct Case {
    name: String,
    ranks: usize,
    op: Collective,
    /// The shape of the whole tensor.
    shape: Vec<usize>,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for ranks in [2, 4] {
        // Tokens outermost, and tokens inside a batch.
        for (layout, shape, tokens) in [
            ("[S,H,D]", vec![8192, 16, 128], 0),
            ("[B,S,H,D]", vec![2, 4096, 16, 128], 1),
        ] {
            let parts = Parts::contiguous(shape[tokens], ranks);
            let heads = Parts::contiguous(16, ranks);
            let to_heads = Collective::AllToAll {
                gather_dim: tokens,
                gather_parts: parts.clone(),
                scatter_dim: tokens + 1,
                scatter_parts: heads.clone(),
            };
            let to_tokens = Collective::AllToAll {
                gather_dim: tokens + 1,
                gather_parts: heads,
                scatter_dim: tokens,
                scatter_parts: parts.clone(),
            };
            for (name, op) in [
                (
                    "all_gather",
                    Collective::AllGather {
                        dim: tokens,
                        parts: parts.clone(),
                    },
                ),
                ("reduce_scatter", Collective::ReduceScatter { dim: tokens, parts }),
                ("all_to_all to heads", to_heads),
                ("all_to_all to tokens", to_tokens),
                ("all_reduce", Collective::AllReduce),
            ] {
                cases.push(Case {
                    name: format!("{name} {layout} P={ranks}"),
                    ranks,
                    op,
                    shape: shape.clone(),
                });
            }
        }
    }
    cases
}

impl Case {
    fn input(&self, rank: usize) -> Buffer {
        let mut shape = self.shape.clone();
        match &self.op {
            Collective::AllGather { dim, parts } => shape[*dim] = parts.len_of(rank),
            Collective::AllToAll {
                gather_dim,
                gather_parts,
                ..
            } => shape[*gather_dim] = gather_parts.len_of(rank),
            _ => {}
        }
        Buffer::from_slice(&vec![1.0f32; shape.iter().product()], shape)
    }

    /// The bytes read and written by all ranks, in units of the whole tensor: by the collective, and by the copies.
    fn traffic(&self) -> (f64, f64) {
        let ranks = self.ranks as f64;
        match self.op {
            Collective::AllGather { .. } => (2.0, 2.0 * ranks),
            Collective::AllReduce => (ranks + 1.0, 2.0 * ranks),
            Collective::ReduceScatter { .. } => (ranks + 1.0, 2.0),
            _ => (2.0, 2.0),
        }
    }

    /// Copy and collective in turn; the times from a common start until all ranks are done.
    fn measure(&self, rounds: u64) -> Result<Vec<(Duration, Duration)>, CommError> {
        let config = ThreadsConfig {
            ranks: self.ranks,
            ..Default::default()
        };
        let measured = launch(&config, |comm| {
            let input = self.input(comm.rank());
            let collective = || {
                let transfer = Transfer {
                    op: self.op.clone(),
                    buffer: input.clone(),
                };
                black_box(
                    comm.run(vec![transfer], Site::here())
                        .unwrap_or_else(|error| raise(error)),
                );
            };
            let elements = {
                let transfer = Transfer {
                    op: self.op.clone(),
                    buffer: input.clone(),
                };
                comm.run(vec![transfer], Site::here())
                    .unwrap_or_else(|error| raise(error))[0]
                    .num_elements()
            };
            let source = vec![1.0f32; elements];
            let copy = || {
                let mut copy = Vec::with_capacity(elements);
                copy.extend_from_slice(&source);
                black_box(copy);
            };
            (0..rounds)
                .map(|_| (time(&*comm, copy), time(&*comm, collective)))
                .collect::<Vec<_>>()
        })?;
        // The rank that was last to leave the closing barrier hardly differs from the first: any rank's clock will do.
        Ok(measured.into_iter().next().unwrap_or_default())
    }
}

fn time(comm: &dyn Communicator, work: impl Fn()) -> Duration {
    comm.barrier().unwrap_or_else(|error| raise(error));
    let begin = Instant::now();
    work();
    comm.barrier().unwrap_or_else(|error| raise(error));
    begin.elapsed()
}

fn median(times: impl Iterator<Item = Duration>) -> Duration {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times[times.len() / 2]
}

fn collectives(criterion: &mut Criterion) {
    let mut table = Vec::new();
    let mut group = criterion.benchmark_group("collectives");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    for case in cases() {
        let times = Mutex::new(Vec::new());
        group.bench_function(&case.name, |bencher| {
            bencher.iter_custom(|rounds| {
                let measured = case.measure(rounds).expect("no rank fails");
                let total = measured.iter().map(|(_, collective)| *collective).sum();
                times.lock().expect("no panic").extend(measured);
                total
            });
        });
        let times = times.into_inner().expect("no panic");
        if times.is_empty() {
            continue; // Left out by a filter on the command line.
        }
        let copy = median(times.iter().map(|(copy, _)| *copy));
        let collective = median(times.iter().map(|(_, collective)| *collective));
        table.push((case, copy, collective));
    }
    group.finish();
    println!(
        "\n{:<36} {:>10} {:>13} {:>8} {:>11}",
        "", "copy", "collective", "times", "bandwidths"
    );
    for (case, copy, collective) in table {
        let (copy, collective) = (1e3 * copy.as_secs_f64(), 1e3 * collective.as_secs_f64());
        let (times, (moved, copied)) = (copy / collective, case.traffic());
        let bandwidths = times * moved / copied;
        println!(
            "{:<36} {copy:>7.2} ms {collective:>10.2} ms {times:>8.2} {bandwidths:>11.2}",
            case.name
        );
    }
}

criterion_group!(benches, collectives);
criterion_main!(benches);
