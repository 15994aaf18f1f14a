//! What the worlds of all engines with a process a rank have in common: the groups that this process's rank is in, and
//! what the line to the hub knows. An engine adds how tensors travel.

use super::Control;
use super::wire::Called;
use crate::CommError;
use crate::engines::shared::activity::Activity;
use crate::engines::shared::counters::Counters;
use crate::engines::shared::lock;
use crate::engines::shared::seat::{self, Members, Posted, Posting};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A group that this process's rank is in.
pub struct Group<T> {
    /// The same on all members.
    pub id: u64,
    pub ranks: Vec<usize>,
    pub axis: Arc<str>,
    /// How many collectives this rank has called.
    called: AtomicU64,
    /// What the engine knows of it.
    pub extra: T,
}

impl<T> fmt::Debug for Group<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("axis", &self.axis)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

impl<T: Send + Sync> Members for Group<T> {
    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn axis(&self) -> &Arc<str> {
        &self.axis
    }
}

impl<T> Group<T> {
    fn new(id: u64, ranks: Vec<usize>, axis: &str, extra: T) -> Arc<Self> {
        Arc::new(Group {
            id,
            ranks,
            axis: axis.into(),
            called: AtomicU64::new(0),
            extra,
        })
    }

    /// All ranks, in the process's `nth` launch.
    pub fn everyone(size: usize, nth: u64, extra: T) -> Arc<Self> {
        Group::new(nth, (0..size).collect(), "world", extra)
    }

    /// The members but this one.
    #[cfg(feature = "nccl")]
    pub fn others(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.ranks.iter().copied().filter(move |member| *member != rank)
    }
}

/// All groups that this process's rank is or was in.
pub struct Groups<T>(Mutex<Vec<Arc<Group<T>>>>);

impl<T> Groups<T> {
    pub fn new(everyone: &Arc<Group<T>>) -> Self {
        Groups(Mutex::new(vec![everyone.clone()]))
    }

    pub fn list(&self) -> MutexGuard<'_, Vec<Arc<Group<T>>>> {
        lock(&self.0)
    }

    /// How many collectives this rank has called, by group.
    pub fn called(&self) -> Called {
        let called = |group: &Arc<Group<T>>| (group.id, group.called.load(Ordering::Relaxed));
        self.list().iter().map(called).collect()
    }
}

/// An engine with a process a rank.
pub trait ProcessWorld: Send + Sync + Sized + 'static {
    /// What it knows of a group beside its members.
    type Extra: Send + Sync + 'static;

    /// This process's line to the hub.
    fn control(&self) -> &Control;

    /// The groups of this process's rank.
    fn groups(&self) -> &Groups<Self::Extra>;

    /// What it knows of a new group.
    fn extra(&self, parent: &Group<Self::Extra>, ranks: &[usize]) -> Self::Extra;

    /// This rank is in a new group.
    fn found(&self, _group: &Arc<Group<Self::Extra>>) -> Result<(), CommError> {
        Ok(())
    }

    /// As [`seat::World::post`].
    fn send_off(
        self: &Arc<Self>,
        group: &Arc<Group<Self::Extra>>,
        posting: Posting,
    ) -> Result<Box<dyn Posted>, CommError>;
}

impl<W: ProcessWorld> seat::World for W {
    type Group = Group<W::Extra>;

    fn timeout(&self) -> Duration {
        self.control().timeout()
    }

    fn failure(&self) -> Option<CommError> {
        self.control().failure()
    }

    fn abort(&self, error: CommError) -> CommError {
        self.control().fail(error)
    }

    fn activity(&self, _rank: usize) -> MutexGuard<'_, Activity> {
        self.control().activity()
    }

    fn counters(&self, _rank: usize) -> MutexGuard<'_, Counters> {
        self.control().counters()
    }

    fn post(self: &Arc<Self>, group: &Arc<Group<W::Extra>>, posting: Posting) -> Result<Box<dyn Posted>, CommError> {
        group.called.fetch_add(1, Ordering::Relaxed);
        self.send_off(group, posting)
    }

    fn subgroup(
        &self,
        parent: &Group<W::Extra>,
        _by: usize,
        ranks: &[usize],
        axis: &str,
        nth: u64,
    ) -> Result<Arc<Group<W::Extra>>, CommError> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        let mut id = DefaultHasher::new();
        (parent.id, sorted, nth).hash(&mut id);
        let group = Group::new(id.finish(), ranks.to_vec(), axis, self.extra(parent, ranks));
        self.groups().list().push(group.clone());
        self.found(&group)?;
        Ok(group)
    }
}
