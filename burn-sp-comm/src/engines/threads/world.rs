//! What all ranks of a launch share.

use super::group::Group;
use super::pending::InRound;
use crate::engines::shared::activity::Activity;
use crate::engines::shared::counters::Counters;
use crate::engines::shared::lock;
use crate::engines::shared::seat::{self, Posted, Posting, Seat};
use crate::{CommError, Communicator};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

/// All ranks of one launch: failure, activity, counters and groups.
#[derive(Debug)]
pub(super) struct World {
    timeout: Duration,
    failure: OnceLock<CommError>,
    board: Vec<Mutex<Activity>>,
    counters: Vec<Mutex<Counters>>,
    /// To wake whoever waits; weak, as a group lives as long as its communicators.
    groups: Mutex<Vec<Weak<Group>>>,
    /// Subgroups that not all of their members have asked for yet.
    founding: Mutex<HashMap<FoundingKey, Founding>>,
    everyone: OnceLock<Arc<Group>>,
}

/// Parent group, members in ascending order, and how many subgroups of these members there were before.
type FoundingKey = (u64, Vec<usize>, u64);

#[derive(Debug)]
struct Founding {
    founder: usize,
    group: Arc<Group>,
    missing: usize,
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
        Arc::new(Seat::new(self.clone(), group.clone(), rank))
    }

    fn found(&self, ranks: Vec<usize>, axis: &str) -> Arc<Group> {
        let mut groups = lock(&self.groups);
        groups.retain(|group| group.strong_count() > 0);
        let group = Arc::new(Group::new(ranks, axis.into()));
        groups.push(Arc::downgrade(&group));
        group
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

    /// What every rank was last doing.
    pub fn report(&self) -> String {
        let line = |(rank, activity)| format!("rank {rank}: {}", lock(activity));
        self.board.iter().enumerate().map(line).collect::<Vec<_>>().join("; ")
    }
}

impl seat::World for World {
    type Group = Group;

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn failure(&self) -> Option<CommError> {
        self.failure.get().cloned()
    }

    /// The caller must hold no lock of a group.
    fn abort(&self, error: CommError) -> CommError {
        if self.failure.set(error).is_ok() {
            tracing::debug!(error = %self.failure.wait(), "the world of ranks fails");
        }
        self.wake_all();
        self.failure.wait().clone()
    }

    fn activity(&self, rank: usize) -> MutexGuard<'_, Activity> {
        lock(&self.board[rank])
    }

    fn counters(&self, rank: usize) -> MutexGuard<'_, Counters> {
        lock(&self.counters[rank])
    }

    fn post(self: &Arc<Self>, group: &Arc<Group>, posting: Posting) -> Result<Box<dyn Posted>, CommError> {
        let Posting {
            rank,
            transfers,
            plans,
            call,
        } = posting;
        let op = transfers[0].op.clone();
        let dtypes = transfers.iter().map(|transfer| transfer.buffer.dtype()).collect();
        let on_device = transfers[0].buffer.host().is_none();
        group
            .post(self, rank, &call, transfers)
            .map_err(|error| self.abort(error))?;
        Ok(Box::new(InRound {
            world: self.clone(),
            group: group.clone(),
            rank,
            op,
            plans,
            dtypes,
            on_device,
            call,
        }))
    }

    fn subgroup(
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
}
