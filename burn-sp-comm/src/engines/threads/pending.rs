//! Waiting for a collective.

use super::group::{Group, Round, Tensors};
use super::joint::Joint;
use super::world::World;
use crate::copy::assemble;
use crate::engines::shared::activity::Call;
use crate::engines::shared::seat::{Posted, World as _};
use crate::engines::shared::{lock, names};
use crate::plan::Plan;
use crate::{Buffer, Collective, CommError};
use burn_std::DType;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Instant;

/// A collective whose tensors this rank has posted.
pub(super) struct InRound {
    pub world: Arc<World>,
    pub group: Arc<Group>,
    /// Within the group.
    pub rank: usize,
    /// Of the first transfer; the others are of the same kind.
    pub op: Collective,
    pub plans: Vec<Plan>,
    pub dtypes: Vec<DType>,
    /// Where the tensors are: of all ranks, or the call would not have been posted.
    pub on_device: bool,
    pub call: Call,
}

impl Drop for InRound {
    fn drop(&mut self) {
        self.group.leave_round(self.call.sequence);
    }
}

impl Posted for InRound {
    fn results(mut self: Box<Self>, deadline: Instant) -> Result<Vec<Buffer>, CommError> {
        let size = self.group.ranks.len();
        match self.op {
            // The tensor has one receiver, which becomes its sole owner if the sender has dropped it.
            Collective::Shift { .. } => {
                let source = self.op.sender(self.rank, size).unwrap_or(self.rank);
                let tensors = self.await_round(deadline, &[source], |round| round.tensors[source].take())?;
                Ok(tensors.map(Arc::unwrap_or_clone).unwrap_or_default())
            }
            Collective::Broadcast { root } => {
                let tensors = self.await_round(deadline, &[root], |round| round.tensors[root].clone())?;
                Ok(tensors.map(Arc::unwrap_or_clone).unwrap_or_default())
            }
            Collective::Barrier => {
                let all: Vec<_> = (0..size).collect();
                let rank = self.rank;
                let tensors = self.await_round(deadline, &all, |round| round.tensors[rank].take())?;
                Ok(tensors.map(Arc::unwrap_or_clone).unwrap_or_default())
            }
            // Each device has its own memory, so there is nothing to share.
            Collective::AllGather { .. } | Collective::AllReduce if !self.on_device => self.joint_results(deadline),
            _ => {
                let tensors = self.everyones_tensors(deadline)?.0;
                let assemble = |(transfer, plan): (usize, Plan)| {
                    let sources: Vec<_> = tensors.iter().map(|tensors| tensors.get(transfer)).collect();
                    assemble(plan, &tensors[self.rank][transfer], &sources)
                };
                let plans = std::mem::take(&mut self.plans).into_iter();
                plans.enumerate().map(assemble).collect()
            }
        }
    }
}

impl InRound {
    /// Results that all ranks share: see [`Joint`].
    fn joint_results(&mut self, deadline: Instant) -> Result<Vec<Buffer>, CommError> {
        let (tensors, joint) = self.everyones_tensors(deadline)?;
        let plans = std::mem::take(&mut self.plans)
            .into_iter()
            .zip(self.dtypes.iter().copied());
        let joint = joint.get_or_init(|| Joint::new(plans));
        // Whoever comes after the end finds the inputs gone, and the results there.
        if joint.results().is_none() && joint.work(&tensors) {
            let mut rounds = lock(&self.group.rounds);
            let inputs = rounds
                .get_mut(&self.call.sequence)
                .map(|round| std::mem::take(&mut round.tensors));
            drop(rounds);
            drop(inputs);
            self.group.signal.notify_all();
        }
        drop(tensors);
        if let Some(results) = joint.results() {
            return Ok(results.clone());
        }
        let ready = |round: &mut Round| round.joint.get().and_then(Joint::results).cloned();
        self.await_that(deadline, &[], ready)
    }

    /// Waits until all ranks have posted; returns their tensors by rank, fewer if nobody needs them any more.
    fn everyones_tensors(&self, deadline: Instant) -> Result<(Vec<Tensors>, Arc<OnceLock<Joint>>), CommError> {
        let all: Vec<_> = (0..self.group.ranks.len()).collect();
        let take = |round: &mut Round| (round.tensors.iter().flatten().cloned().collect(), round.joint.clone());
        self.await_round(deadline, &all, take)
    }

    /// Blocks until `needed` (ranks within the group) have posted, then takes something from the round.
    fn await_round<R>(
        &self,
        deadline: Instant,
        needed: &[usize],
        take: impl FnOnce(&mut Round) -> R,
    ) -> Result<R, CommError> {
        let mut take = Some(take);
        self.await_that(deadline, needed, |round| take.take().map(|take| take(round)))
    }

    /// Blocks until `needed` have posted and `take` returns something. Fails with the world, at the deadline, or if a
    /// needed rank has returned.
    fn await_that<R>(
        &self,
        deadline: Instant,
        needed: &[usize],
        mut take: impl FnMut(&mut Round) -> Option<R>,
    ) -> Result<R, CommError> {
        let mut rounds = lock(&self.group.rounds);
        loop {
            if let Some(error) = self.world.failure() {
                return Err(error);
            }
            let Some(round) = rounds.get_mut(&self.call.sequence) else {
                // It is there until this rank, too, has left it.
                return Err(CommError::invalid("the round of a pending collective is gone"));
            };
            let missing: Vec<_> = needed
                .iter()
                .copied()
                .filter(|&rank| round.posts[rank].is_none())
                .collect();
            if missing.is_empty()
                && let Some(taken) = take(round)
            {
                return Ok(taken);
            }
            let left = missing
                .iter()
                .map(|&rank| self.group.ranks[rank])
                .find(|&r| self.world.activity(r).has_left());
            let remaining = deadline.saturating_duration_since(Instant::now());
            if left.is_some() || remaining.is_zero() {
                drop(rounds);
                return Err(self.give_up(left, &missing));
            }
            rounds = self
                .group
                .signal
                .wait_timeout(rounds, remaining)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Fails the world because `missing` ranks do not come: too late, or never, as one of them has returned.
    fn give_up(&self, left: Option<usize>, missing: &[usize]) -> CommError {
        let (rank, call) = (self.group.ranks[self.rank], &self.call);
        let names = match missing {
            [] => "the others' work".into(),
            missing => names(missing.iter().map(|&rank| self.group.ranks[rank])),
        };
        let activities = self.world.report();
        self.world.abort(match left {
            Some(left) => {
                let report = format!("rank {rank} is in {call}, waiting for {names}. {activities}");
                CommError::Departed { rank: left, report }
            }
            None => {
                let waited = call.waited(rank, self.world.timeout(), &names);
                let report = format!("{waited}. {activities}");
                CommError::Timeout { report }
            }
        })
    }
}
