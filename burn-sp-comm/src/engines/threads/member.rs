//! A rank's seat in a group: the communicator.

use super::board::Call;
use super::group::Group;
use super::pending::{Alone, Started};
use super::world::{World, lock};
use crate::copy::assemble;
use crate::plan::Plan;
use crate::span::span;
use crate::stats::elements_sent;
use crate::{Buffer, CommError, Communicator, Counter, Pending, Site, Transfer};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A rank's seat in a group.
pub(super) struct Member {
    world: Arc<World>,
    group: Arc<Group>,
    rank: usize,
    /// The number of the next collective.
    next: AtomicU64,
    /// How many subgroups of which members have been asked for.
    founded: Mutex<HashMap<Vec<usize>, u64>>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member")
            .field("rank", &self.rank)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl Member {
    pub fn new(world: Arc<World>, group: Arc<Group>, rank: usize) -> Self {
        Member {
            world,
            group,
            rank,
            next: AtomicU64::new(0),
            founded: Mutex::default(),
        }
    }

    fn global_rank(&self) -> usize {
        self.group.ranks[self.rank]
    }

    /// The plans of all transfers, or what about them cannot work.
    fn plans(&self, transfers: &[Transfer], site: Site) -> Result<Vec<Plan>, CommError> {
        let refuse = |name: &str, fault: &str| {
            let (rank, axis) = (self.global_rank(), &self.group.axis);
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

impl Communicator for Member {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        &self.group.ranks
    }

    fn axis(&self) -> &str {
        &self.group.axis
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
        let kinds = transfers.iter().map(|transfer| transfer.buffer.dtype()).collect();
        let on_device = transfers[0].buffer.host().is_none();
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let call = Call {
            name: op.name(),
            axis: self.group.axis.clone(),
            sequence,
            site,
        };
        let _posting = span(&op, "start", &self.group.axis, sequence, bytes, site).entered();
        self.world.activity(self.global_rank()).started(&call);
        if let Err(error) = self.group.post(&self.world, self.rank, sequence, site, transfers) {
            return Err(self.world.abort(error));
        }
        self.world.count(
            self.global_rank(),
            op.name(),
            &self.group.axis,
            1,
            bytes,
            begin.elapsed(),
        );
        let (world, group) = (self.world.clone(), self.group.clone());
        Ok(Box::new(Started {
            world,
            group,
            rank: self.rank,
            op,
            plans,
            dtypes: kinds,
            bytes,
            on_device,
            call,
        }))
    }

    fn subgroup(&self, ranks: &[usize], axis: &str) -> Result<Arc<dyn Communicator>, CommError> {
        let global = self.global_rank();
        let refuse =
            |fault: &str| CommError::invalid(format!("rank {global}: subgroup {ranks:?} over {axis}: {fault}"));
        let Some(rank) = ranks.iter().position(|rank| *rank == global) else {
            return Err(refuse("does not contain the rank that asks for it"));
        };
        if let Some(stranger) = ranks.iter().find(|rank| !self.group.ranks.contains(rank)) {
            return Err(refuse(&format!(
                "rank {stranger} is not in the group {:?}",
                self.group.ranks
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
        Ok(Arc::new(Member::new(self.world.clone(), group, rank)))
    }

    fn statistics(&self) -> Vec<Counter> {
        self.world.counters(self.global_rank())
    }

    fn reset_statistics(&self) {
        self.world.reset_counters(self.global_rank());
    }

    fn abort(&self, error: CommError) {
        self.world.abort(error);
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
