//! The trait behind which every engine stands.

use crate::{Buffer, Collective, CommError, Counter, Parts};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// One tensor and what is to be done with it.
///
/// Several transfers of one kind (all of them, say, all-to-alls) travel in one call, as one message: q, k and v
/// packed. Their parameters may differ, since k and v may have fewer heads than q.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The operation.
    pub op: Collective,
    /// This rank's tensor.
    pub buffer: Buffer,
}

/// Where in the user's program a collective was called; shown in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// File, line and column, both counted from 1.
    pub location: &'static Location<'static>,
    /// Whether the collective is the backward of the one called there.
    pub backward: bool,
}

impl Site {
    /// The caller's place, or that of its caller where the caller is `#[track_caller]` too.
    #[track_caller]
    pub fn here() -> Self {
        Site {
            location: Location::caller(),
            backward: false,
        }
    }

    /// The same place, marked as its backward.
    #[must_use]
    pub fn backward(self) -> Self {
        Site { backward: true, ..self }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = if self.backward { "backward of " } else { "" };
        write!(f, "{prefix}{}", self.location)
    }
}

/// One rank's seat in a group of ranks.
///
/// All members of a group call the same collectives in the same order. Calls on *different* groups may be in flight at
/// the same time, and so may several started calls on one group.
///
/// Every method that can fail fails on all ranks of the world with the same report, except for [`CommError::Invalid`],
/// which the calling rank alone gets and nothing has been sent.
///
/// # Example
/// ```
/// use burn_sp_comm::engines::threads::{ThreadsConfig, try_launch};
/// use burn_sp_comm::{Buffer, Collective, CommError, Site, Transfer};
///
/// let config = ThreadsConfig { ranks: 2, ..Default::default() };
/// let sums = try_launch(&config, |comm| {
///     // Two tensors in one message; a rank may compute between `start` and `wait`.
///     let own = [Buffer::from_slice(&[comm.rank() as f32], [1]), Buffer::from_slice(&[10i64, 20], [2])];
///     let transfers = own.map(|buffer| Transfer { op: Collective::AllReduce, buffer });
///     let results = comm.start(transfers.into(), Site::here())?.wait()?;
///     Ok::<_, CommError>((results[0].to_vec::<f32>(), results[1].to_vec::<i64>()))
/// })?;
/// assert_eq!(sums, vec![(vec![1.0], vec![20, 40]); 2]);
/// # Ok::<(), CommError>(())
/// ```
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This rank within the group, `0..size`.
    fn rank(&self) -> usize;

    /// The global ranks of the group's members, by rank within the group: any set, in any order.
    fn ranks(&self) -> &[usize];

    /// The number of members.
    fn size(&self) -> usize {
        self.ranks().len()
    }

    /// The label under which traffic is counted and reported, e.g. `"ulysses"`.
    fn axis(&self) -> &str;

    /// Posts the transfers and returns at once; [`Pending::wait`] brings the results.
    ///
    /// # Errors
    /// [`CommError::Invalid`] for arguments that cannot work; any other if the world has failed.
    fn start(&self, transfers: Vec<Transfer>, site: Site) -> Result<Box<dyn Pending>, CommError>;

    /// Starts and waits. The results are in the order of the transfers.
    ///
    /// # Errors
    /// See [`Communicator::start`] and [`Pending::wait`].
    fn run(&self, transfers: Vec<Transfer>, site: Site) -> Result<Vec<Buffer>, CommError> {
        self.start(transfers, site)?.wait()
    }

    /// A group of some of this group's members, given by their *global* ranks; a member's rank in it is its place in
    /// the list.
    ///
    /// All members of the new group must call it, with the same list and axis; nobody else. It does not wait for them.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the list does not contain the caller, repeats a rank or names one outside this group;
    /// [`CommError::Mismatch`] if members order it differently or label it differently.
    fn subgroup(&self, ranks: &[usize], axis: &str) -> Result<Arc<dyn Communicator>, CommError>;

    /// The counters of this global rank, over all its groups, ordered by operation and axis.
    fn statistics(&self) -> Vec<Counter>;

    /// Sets the counters of this global rank to nothing.
    fn reset_statistics(&self);

    /// Fails every rank of the world with `error`, waking those that wait. The first error wins.
    fn abort(&self, error: CommError);
}

/// A collective that has been started.
///
/// Dropping it forgoes this rank's results; the other ranks still get theirs.
pub trait Pending: Send {
    /// Blocks (without spinning) until the results are there, in the order of the transfers.
    ///
    /// # Errors
    /// The world's error if any rank has failed, at the latest when the timeout has passed.
    fn wait(self: Box<Self>) -> Result<Vec<Buffer>, CommError>;
}

/// The collectives on a single tensor. Shapes and errors: see [`Collective`] and [`Communicator::run`].
impl dyn Communicator + '_ {
    /// Own slice of `dim` -> whole `dim`. See [`Collective::AllGather`].
    ///
    /// # Shapes
    /// - `buffer`: `parts.len_of(rank)` long in `dim`; returns the same, `parts.extent()` long in it
    ///
    /// # Errors
    /// See [`Communicator::run`].
    #[track_caller]
    pub fn all_gather(&self, buffer: Buffer, dim: usize, parts: &Parts) -> Result<Buffer, CommError> {
        self.single(
            Collective::AllGather {
                dim,
                parts: parts.clone(),
            },
            buffer,
        )
    }

    /// Whole `dim` -> own slice of the sum. See [`Collective::ReduceScatter`].
    ///
    /// # Shapes
    /// - `buffer`: `parts.extent()` long in `dim`; returns the same, `parts.len_of(rank)` long in it
    ///
    /// # Errors
    /// See [`Communicator::run`].
    #[track_caller]
    pub fn reduce_scatter(&self, buffer: Buffer, dim: usize, parts: &Parts) -> Result<Buffer, CommError> {
        self.single(
            Collective::ReduceScatter {
                dim,
                parts: parts.clone(),
            },
            buffer,
        )
    }

    /// The sum over the ranks. See [`Collective::AllReduce`].
    ///
    /// # Shapes
    /// - `buffer`: any, the same on all ranks, and so is the result
    ///
    /// # Errors
    /// See [`Communicator::run`].
    #[track_caller]
    pub fn all_reduce(&self, buffer: Buffer) -> Result<Buffer, CommError> {
        self.single(Collective::AllReduce, buffer)
    }

    /// Gathers one dimension and scatters another. See [`Collective::AllToAll`].
    ///
    /// # Shapes
    /// - `buffer`: in the dimension to gather this rank's part, in the one to scatter the whole
    /// - returns the same, in the first dimension the whole, in the second this rank's part
    ///
    /// # Errors
    /// See [`Communicator::run`].
    #[track_caller]
    pub fn all_to_all(
        &self,
        buffer: Buffer,
        gather: (usize, &Parts),
        scatter: (usize, &Parts),
    ) -> Result<Buffer, CommError> {
        let op = Collective::AllToAll {
            gather_dim: gather.0,
            gather_parts: gather.1.clone(),
            scatter_dim: scatter.0,
            scatter_parts: scatter.1.clone(),
        };
        self.single(op, buffer)
    }

    /// Sends to rank + `by`, receives from rank - `by`. See [`Collective::Shift`].
    ///
    /// # Shapes
    /// - `buffer`: any; returns that of the sender's
    ///
    /// # Errors
    /// See [`Communicator::run`].
    #[track_caller]
    pub fn shift(&self, buffer: Buffer, by: isize) -> Result<Buffer, CommError> {
        self.single(Collective::Shift { by }, buffer)
    }

    /// `root`'s tensor on every rank; the others may pass [`Buffer::empty`]. See [`Collective::Broadcast`].
    ///
    /// # Shapes
    /// - `buffer`: any; returns that of `root`'s
    ///
    /// # Errors
    /// See [`Communicator::run`].
    #[track_caller]
    pub fn broadcast(&self, buffer: Buffer, root: usize) -> Result<Buffer, CommError> {
        self.single(Collective::Broadcast { root }, buffer)
    }

    /// Returns when all members have called it.
    ///
    /// # Errors
    /// See [`Communicator::run`].
    #[track_caller]
    pub fn barrier(&self) -> Result<(), CommError> {
        self.single(Collective::Barrier, Buffer::empty()).map(|_| ())
    }

    #[track_caller]
    fn single(&self, op: Collective, buffer: Buffer) -> Result<Buffer, CommError> {
        let mut results = self.run(vec![Transfer { op, buffer }], Site::here())?;
        match results.pop() {
            Some(result) if results.is_empty() => Ok(result),
            // An engine owes one result a transfer.
            _ => Err(CommError::invalid(
                "the engine did not return one result for one transfer",
            )),
        }
    }
}
