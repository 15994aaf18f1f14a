//! Ranks as threads of one process: nothing to install, and the peers' memory is read in place.
//!
//! A group keeps one *round* per collective, by its number in the group. A rank posts its tensors into the round and
//! goes on; a waiting rank blocks until those that it needs have posted, then reads their tensors where they are.
//! Tensors are immutable while they are shared, so nobody has to wait until the others have read.
//!
//! Results that are the same on all ranks (all-gather, all-reduce) are made once, by all waiting ranks together, and
//! shared: simulating P ranks costs neither P copies nor P times the work.

mod group;
mod joint;
mod pending;
mod world;

use super::shared::activity::Activity;
use super::shared::panics;
use super::shared::seat::World as _;
use crate::{CommError, Communicator};
use std::fmt::Display;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use world::World;

/// How to run ranks as threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadsConfig {
    /// How many ranks; at least one.
    pub ranks: usize,
    /// How long a rank waits inside one collective before the whole world fails.
    pub timeout: Duration,
}

impl Default for ThreadsConfig {
    /// One rank, 60 seconds.
    fn default() -> Self {
        ThreadsConfig {
            ranks: 1,
            timeout: Duration::from_secs(60),
        }
    }
}

/// Runs `body` once per rank, each on its own thread, and returns every rank's result in order.
///
/// The threads are plain ones named `rank 0`, `rank 1`, ..., so a rank that blocks in a collective takes no worker
/// from a thread pool. Each gets its communicator of the world: all ranks, axis `"world"`; smaller groups come from
/// [`Communicator::subgroup`].
///
/// # Errors
/// If any rank fails, the first failure: a panic, an error thrown by [`raise`](crate::raise), a timeout, a mismatch, a
/// rank that returned while others wait for it, or [`Communicator::abort`]. The others are woken up from whatever
/// collective they are in; their own results are dropped. A rank that computes for ever cannot be stopped, as no
/// thread can: every wait *inside a collective* has a deadline, the ranks' own code has none.
///
/// The message of a panic is in the error; it is not printed. Without ranks, [`CommError::Invalid`].
///
/// # Example
/// ```
/// use burn_sp_comm::Buffer;
/// use burn_sp_comm::engines::threads::{ThreadsConfig, launch};
///
/// let config = ThreadsConfig { ranks: 4, ..Default::default() };
/// let received = launch(&config, |comm| {
///     // Two rings of two ranks: 0 and 2, 1 and 3.
///     let first = comm.rank() % 2;
///     let ring = comm.subgroup(&[first, first + 2], "ring").unwrap();
///     let own = Buffer::from_slice(&[comm.rank() as u32], [1]);
///     ring.shift(own, 1).unwrap().to_vec::<u32>()[0]
/// })?;
/// assert_eq!(received, [2, 3, 0, 1]);
///
/// // What goes wrong on one rank is everyone's error.
/// let error = launch(&config, |comm| {
///     assert!(comm.rank() != 2, "no more tokens");
///     comm.barrier()
/// });
/// assert!(error.unwrap_err().to_string().starts_with("rank 2 panicked"));
/// # Ok::<(), burn_sp_comm::CommError>(())
/// ```
pub fn launch<T, F>(config: &ThreadsConfig, body: F) -> Result<Vec<T>, CommError>
where
    T: Send,
    F: Fn(Arc<dyn Communicator>) -> T + Send + Sync,
{
    if config.ranks == 0 {
        return Err(CommError::invalid("launch: 0 ranks, at least 1 is needed"));
    }
    let world = World::new(config.ranks, config.timeout);
    let results: Vec<Mutex<Option<T>>> = (0..config.ranks).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for (rank, result) in results.iter().enumerate() {
            let (world_of_rank, body) = (world.clone(), &body);
            let run = move || {
                *result.lock().unwrap_or_else(PoisonError::into_inner) = run_rank(world_of_rank, rank, body);
            };
            // As much stack as a main thread: dropping a long autodiff graph recurses.
            let thread = std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .stack_size(8 << 20);
            if let Err(error) = thread.spawn_scoped(scope, run) {
                world.abort(CommError::failed(
                    rank,
                    format!("its thread cannot be started: {error}"),
                ));
                break;
            }
        }
    });
    if let Some(error) = world.failure() {
        return Err(error);
    }
    // Without a failure every rank has returned, so no result is missing.
    let results = results
        .into_iter()
        .filter_map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner));
    Ok(results.collect())
}

/// As [`launch`], for ranks that may return an error: it fails the world at once, as [`CommError::Failed`].
///
/// # Errors
/// As [`launch`].
pub fn try_launch<T, E, F>(config: &ThreadsConfig, body: F) -> Result<Vec<T>, CommError>
where
    T: Send,
    E: Display,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Send + Sync,
{
    launch(config, |comm| {
        let rank = comm.rank();
        body(comm).unwrap_or_else(|error| crate::raise(CommError::failed(rank, error)))
    })
}

fn run_rank<T>(world: Arc<World>, rank: usize, body: impl Fn(Arc<dyn Communicator>) -> T) -> Option<T> {
    let comm = world.communicator(rank);
    match panics::caught(rank, || body(comm)) {
        Ok(result) => {
            world.leave(rank, Activity::finished);
            Some(result)
        }
        Err(error) => {
            world.abort(error);
            world.leave(rank, Activity::panicked);
            None
        }
    }
}
