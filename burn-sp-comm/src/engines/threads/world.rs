//! What all ranks of a launch share.

use super::board::Activity;
use super::group::Group;
use super::member::Member;
use crate::{CommError, Communicator, Counter};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// All ranks of one launch: failure, activity, counters and groups.
#[derive(Debug)]
pub(super) struct World {
    pub timeout: Duration,
    failure: OnceLock<CommError>,
    board: Vec<Mutex<Activity>>,
    counters: Vec<Mutex<Counters>>,
    /// To wake whoever waits; weak, as a group lives as long as its communicators.
    groups: Mutex<Vec<Weak<Group>>>,
    /// Subgroups that not all of their members have asked for yet.
    founding: Mutex<HashMap<FoundingKey, Founding>>,
    everyone: OnceLock<Arc<Group>>,
}

/// By operation and axis.
type Counters = BTreeMap<(&'static str, Arc<str>), Tally>;

/// Parent group, members in ascending order, and how many subgroups of these members there were before.
type FoundingKey = (u64, Vec<usize>, u64);

#[derive(Debug)]
struct Founding {
    founder: usize,
    group: Arc<Group>,
    missing: usize,
}

#[derive(Debug, Default)]
struct Tally {
    calls: u64,
    bytes: u64,
    time: Duration,
}

/// Locks also what a panicking thread has left locked: all our updates are single steps, so nothing is ever half done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub fn new(ranks: usize, timeout: Duration) -> Arc<Self> {
        Arc::new(World {
            timeout,
            failure: OnceLock::new(),
            board: (0..ranks).map(|_| Mutex::new(Activity::new())).collect(),
            counters: (0..ranks).map(|_| Mutex::default()).collect(),
            groups: Mutex::default(),
            founding: Mutex::default(),
            everyone: OnceLock::new(),
        })
    }

    /// Rank `rank`'s seat in the group of all ranks.
    pub fn communicator(self: &Arc<Self>, rank: usize) -> Arc<dyn Communicator> {
        let group = self
            .everyone
            .get_or_init(|| self.found((0..self.board.len()).collect(), "world"));
        Arc::new(Member::new(self.clone(), group.clone(), rank))
    }

    fn found(&self, ranks: Vec<usize>, axis: &str) -> Arc<Group> {
        let mut groups = lock(&self.groups);
        groups.retain(|group| group.strong_count() > 0);
        let group = Arc::new(Group::new(ranks, axis.into()));
        groups.push(Arc::downgrade(&group));
        group
    }

    /// The `nth` subgroup of `parent` with these members, as asked for by the global rank `by`.
    pub fn subgroup(
        &self,
        parent: &Group,
        by: usize,
        ranks: &[usize],
        axis: &str,
        nth: u64,
    ) -> Result<Arc<Group>, CommError> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        let key = (parent.id, sorted, nth);
        let mut founding = lock(&self.founding);
        let entry = founding.entry(key.clone()).or_insert_with(|| Founding {
            founder: by,
            group: self.found(ranks.to_vec(), axis),
            missing: ranks.len(),
        });
        if entry.group.ranks != ranks || *entry.group.axis != *axis {
            let (founder, group) = (entry.founder, entry.group.clone());
            drop(founding);
            let report = format!(
                "rank {founder}: subgroup {:?} over {}; rank {by}: subgroup {ranks:?} over {axis}",
                group.ranks, group.axis
            );
            return Err(self.abort(CommError::Mismatch {
                difference: "subgroup".into(),
                report,
            }));
        }
        let group = entry.group.clone();
        entry.missing -= 1;
        if entry.missing == 0 {
            founding.remove(&key);
        }
        Ok(group)
    }

    /// Why the world has failed, if it has.
    pub fn failure(&self) -> Option<CommError> {
        self.failure.get().cloned()
    }

    /// Fails the world, unless it has failed already, and wakes everyone. Returns the error that counts.
    ///
    /// The caller must hold no lock of a group.
    pub fn abort(&self, error: CommError) -> CommError {
        if self.failure.set(error).is_ok() {
            tracing::debug!(error = %self.failure.wait(), "the world of ranks fails");
        }
        self.wake_all();
        self.failure.wait().clone()
    }

    /// Notes that a rank's code has ended, and wakes those who may wait for it.
    pub fn leave(&self, rank: usize, how: impl FnOnce(&mut Activity)) {
        how(&mut lock(&self.board[rank]));
        self.wake_all();
    }

    fn wake_all(&self) {
        let groups: Vec<_> = lock(&self.groups).iter().filter_map(Weak::upgrade).collect();
        groups.iter().for_each(|group| group.wake());
    }

    pub fn activity(&self, rank: usize) -> MutexGuard<'_, Activity> {
        lock(&self.board[rank])
    }

    /// What every rank was last doing.
    pub fn report(&self) -> String {
        let line = |(rank, activity)| format!("rank {rank}: {}", lock(activity));
        self.board.iter().enumerate().map(line).collect::<Vec<_>>().join("; ")
    }

    /// Adds to the counters of a rank.
    pub fn count(&self, rank: usize, op: &'static str, axis: &Arc<str>, calls: u64, bytes: usize, time: Duration) {
        let mut counters = lock(&self.counters[rank]);
        let tally = counters.entry((op, axis.clone())).or_default();
        tally.calls += calls;
        tally.bytes += bytes as u64;
        tally.time += time;
    }

    pub fn counters(&self, rank: usize) -> Vec<Counter> {
        let counter = |((op, axis), tally): (&(&'static str, Arc<str>), &Tally)| Counter {
            rank,
            op: op.to_string(),
            axis: axis.to_string(),
            calls: tally.calls,
            bytes_sent: tally.bytes,
            seconds: tally.time.as_secs_f64(),
        };
        lock(&self.counters[rank]).iter().map(counter).collect()
    }

    pub fn reset_counters(&self, rank: usize) {
        lock(&self.counters[rank]).clear();
    }
}
