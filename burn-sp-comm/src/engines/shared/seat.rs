//! A rank's seat in a group: the communicator of every engine. It checks what a rank asks for, keeps the activity and
//! the counters, and leaves the moving of tensors to the engine's [`World`].

use super::activity::{Activity, Call};
use super::counters::Counters;
use super::{deadline, lock};
use crate::copy::assemble;
use crate::plan::Plan;
use crate::span::span;
use crate::stats::elements_sent;
use crate::{Buffer, Collective, CommError, Communicator, Counter, Pending, Site, Transfer};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// An engine, as seats see it. Ranks are global ones unless said otherwise.
pub trait World: Send + Sync + Sized + 'static {
    /// What the members of a group share, as far as this process knows it.
    type Group: Members;

    /// How long a rank waits inside one collective before the whole world fails.
    fn timeout(&self) -> Duration;

    /// Why the world has failed, if it has.
    fn failure(&self) -> Option<CommError>;

    /// Fails the world, unless it has failed already, and wakes everyone. Returns the error that counts.
    fn abort(&self, error: CommError) -> CommError;

    /// The line of a rank of this process on the board.
    fn activity(&self, rank: usize) -> MutexGuard<'_, Activity>;

    /// The counters of a rank of this process.
    fn counters(&self, rank: usize) -> MutexGuard<'_, Counters>;

    /// Sends off the tensors of a call that has been checked; the group has several members.
    fn post(self: &Arc<Self>, group: &Arc<Self::Group>, posting: Posting) -> Result<Box<dyn Posted>, CommError>;

    /// The `nth` subgroup of `parent` with these members, as asked for by the rank `by`.
    fn subgroup(
        &self,
        parent: &Self::Group,
        by: usize,
        ranks: &[usize],
        axis: &str,
        nth: u64,
    ) -> Result<Arc<Self::Group>, CommError>;
}

/// The members of a group and its label.
pub trait Members: fmt::Debug + Send + Sync {
    /// Global ranks, by rank within the group.
    fn ranks(&self) -> &[usize];

    /// The label.
    fn axis(&self) -> &Arc<str>;
}

/// A call of a collective that can work.
pub struct Posting {
    /// The caller's rank within the group.
    pub rank: usize,
    /// At least one, all of one kind and in one kind of memory.
    pub transfers: Vec<Transfer>,
    /// How the results come about, by transfer.
    pub plans: Vec<Plan>,
    pub call: Call,
}

/// A call whose tensors are on their way.
pub trait Posted: Send {
    /// Blocks until the results are there, at most until the deadline.
    fn results(self: Box<Self>, deadline: Instant) -> Result<Vec<Buffer>, CommError>;
}

/// A rank's seat in a group.
pub struct Seat<W: World> {
    world: Arc<W>,
    group: Arc<W::Group>,
    rank: usize,
    /// The number of the next collective.
    next: AtomicU64,
    /// How many subgroups of which members have been asked for.
    founded: Mutex<HashMap<Vec<usize>, u64>>,
}

impl<W: World> fmt::Debug for Seat<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat")
            .field("rank", &self.rank)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl<W: World> Seat<W> {
    pub fn new(world: Arc<W>, group: Arc<W::Group>, rank: usize) -> Self {
        Seat {
            world,
            group,
            rank,
            next: AtomicU64::new(0),
            founded: Mutex::default(),
        }
    }

    fn global_rank(&self) -> usize {
        self.group.ranks()[self.rank]
    }

    /// The plans of all transfers, or what about them cannot work.
    fn plans(&self, transfers: &[Transfer], site: Site) -> Result<Vec<Plan>, CommError> {
        let refuse = |name: &str, fault: &str| {
            let (rank, axis) = (self.global_rank(), self.group.axis());
            CommError::invalid(format!("rank {rank}: {name} over {axis} at {site}: {fault}"))
        };
        let Some(first) = transfers.first() else {
            return Err(refuse("collective", "no tensor was given"));
        };
        let name = first.op.name();
        if let Some(other) = transfers.iter().find(|transfer| transfer.op.name() != name) {
            let other = other.op.name();
            return Err(refuse(
                name,
                &format!("one call is of one kind, but {other} is packed with it"),
            ));
        }
        let on_device = |transfer: &Transfer| transfer.buffer.host().is_none();
        if transfers.iter().any(|transfer| on_device(transfer) != on_device(first)) {
            return Err(refuse(
                name,
                "tensors in host memory and on a device are packed together",
            ));
        }
        let plan = |transfer: &Transfer| {
            Plan::new(&transfer.op, self.size(), self.rank, transfer.buffer.shape())
                .map_err(|fault| refuse(name, &fault))
        };
        transfers.iter().map(plan).collect()
    }
}

impl<W: World> Communicator for Seat<W> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        self.group.ranks()
    }

    fn axis(&self) -> &str {
        self.group.axis()
    }

    fn start(&self, transfers: Vec<Transfer>, site: Site) -> Result<Box<dyn Pending>, CommError> {
        let begin = Instant::now();
        if let Some(error) = self.world.failure() {
            return Err(error);
        }
        let plans = self.plans(&transfers, site)?;
        let size = self.size();
        if size == 1 {
            return Ok(Box::new(Alone(
                transfers.into_iter().zip(plans).map(alone).collect::<Result<_, _>>()?,
            )));
        }
        let sent = |Transfer { op, buffer }: &Transfer| {
            elements_sent(op, size, self.rank, buffer.shape()) * buffer.dtype().size()
        };
        let bytes = transfers.iter().map(sent).sum();
        let op = transfers[0].op.clone();
        let axis = self.group.axis();
        let call = Call {
            name: op.name(),
            axis: axis.clone(),
            sequence: self.next.fetch_add(1, Ordering::Relaxed),
            site: site.into(),
        };
        let _posting = span(&op, "start", axis, call.sequence, bytes, site).entered();
        let rank = self.global_rank();
        self.world.activity(rank).started(&call);
        let posting = Posting {
            rank: self.rank,
            transfers,
            plans,
            call: call.clone(),
        };
        let posted = self.world.post(&self.group, posting)?;
        self.world
            .counters(rank)
            .add(op.name(), axis, 1, bytes, begin.elapsed());
        Ok(Box::new(Started {
            world: self.world.clone(),
            rank,
            op,
            bytes,
            call,
            site,
            posted,
        }))
    }

    fn subgroup(&self, ranks: &[usize], axis: &str) -> Result<Arc<dyn Communicator>, CommError> {
        let global = self.global_rank();
        let refuse =
            |fault: &str| CommError::invalid(format!("rank {global}: subgroup {ranks:?} over {axis}: {fault}"));
        let Some(rank) = ranks.iter().position(|rank| *rank == global) else {
            return Err(refuse("does not contain the rank that asks for it"));
        };
        if let Some(stranger) = ranks.iter().find(|rank| !self.ranks().contains(rank)) {
            return Err(refuse(&format!(
                "rank {stranger} is not in the group {:?}",
                self.ranks()
            )));
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(refuse(&format!("names rank {} twice", pair[0])));
        }
        if let Some(error) = self.world.failure() {
            return Err(error);
        }
        let nth = {
            let mut founded = lock(&self.founded);
            let count = founded.entry(sorted).or_default();
            *count += 1;
            *count
        };
        let group = self.world.subgroup(&self.group, global, ranks, axis, nth)?;
        Ok(Arc::new(Seat::new(self.world.clone(), group, rank)))
    }

    fn statistics(&self) -> Vec<Counter> {
        let rank = self.global_rank();
        self.world.counters(rank).report(rank)
    }

    fn reset_statistics(&self) {
        self.world.counters(self.global_rank()).clear();
    }

    fn abort(&self, error: CommError) {
        self.world.abort(error);
    }
}

/// A call that this rank has posted.
struct Started<W> {
    world: Arc<W>,
    /// The global one.
    rank: usize,
    /// Of the first transfer; the others are of the same kind.
    op: Collective,
    /// Payload that leaves this rank.
    bytes: usize,
    call: Call,
    site: Site,
    posted: Box<dyn Posted>,
}

impl<W: World> Pending for Started<W> {
    fn wait(self: Box<Self>) -> Result<Vec<Buffer>, CommError> {
        let Started { world, rank, call, .. } = *self;
        let _waiting = span(&self.op, "wait", &call.axis, call.sequence, self.bytes, self.site).entered();
        let begin = Instant::now();
        world.activity(rank).waiting(&call);
        let results = self.posted.results(deadline(world.timeout()));
        world.activity(rank).computing();
        world
            .counters(rank)
            .add(self.op.name(), &call.axis, 0, 0, begin.elapsed());
        results
    }
}

/// A collective in a group of one is done when it starts.
struct Alone(Vec<Buffer>);

impl Pending for Alone {
    fn wait(self: Box<Self>) -> Result<Vec<Buffer>, CommError> {
        Ok(self.0)
    }
}

/// In a group of one: the tensor itself, unless its parts reorder it.
fn alone((transfer, plan): (Transfer, Plan)) -> Result<Buffer, CommError> {
    let buffer = transfer.buffer;
    if plan.is_copy_of(0, buffer.shape()) {
        Ok(buffer)
    } else {
        assemble(plan, &buffer, &[Some(&buffer)])
    }
}
