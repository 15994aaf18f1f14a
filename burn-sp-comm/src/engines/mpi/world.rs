//! This process's rank in the world: groups, and calls on their way to the engine's thread.

use super::call::{Call, Landing, Needs, Slot};
use super::posting::{Own, UnderWay, hand_over};
use super::progress::Command;
use crate::buffer::Storage;
use crate::engines::processes::Control;
use crate::engines::shared::activity::Activity;
use crate::engines::shared::counters::Counters;
use crate::engines::shared::fingerprint::Fingerprint;
use crate::engines::shared::lock;
use crate::engines::shared::seat::{self, Members, Posted, Posting};
use crate::{Buffer, Collective, CommError, DeviceTensor};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// This process's rank in the world.
pub struct World {
    pub control: Arc<Control>,
    engine: Sender<Command>,
    groups: Mutex<Vec<Arc<Group>>>,
}

/// A group that this process's rank is in.
#[derive(Debug)]
pub struct Group {
    /// The same on all members.
    pub id: u64,
    pub ranks: Vec<usize>,
    pub axis: Arc<str>,
    /// Sets the group's messages apart from those of others. Its first member chooses it and tells the others.
    pub channel: OnceLock<usize>,
    /// How many collectives this rank has called.
    called: AtomicU64,
}

impl Members for Group {
    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn axis(&self) -> &Arc<str> {
        &self.axis
    }
}

impl Group {
    fn new(id: u64, ranks: Vec<usize>, axis: &str) -> Arc<Self> {
        Arc::new(Group {
            id,
            ranks,
            axis: axis.into(),
            channel: OnceLock::new(),
            called: AtomicU64::new(0),
        })
    }

    /// All ranks, in the process's `nth` launch. Its channel needs no agreement.
    pub fn everyone(size: usize, nth: u64) -> Arc<Self> {
        let group = Group::new(nth, (0..size).collect(), "world");
        group.channel.get_or_init(|| 0);
        group
    }
}

impl World {
    pub fn new(control: Arc<Control>, engine: Sender<Command>, everyone: &Arc<Group>) -> Arc<Self> {
        Arc::new(World {
            control,
            engine,
            groups: Mutex::new(vec![everyone.clone()]),
        })
    }

    /// How many collectives this rank has called, by group.
    pub fn called(&self) -> Vec<(u64, u64)> {
        let called = |group: &Arc<Group>| (group.id, group.called.load(Ordering::Relaxed));
        lock(&self.groups).iter().map(called).collect()
    }

    /// Hands something to the engine's thread, which lives as long as the process.
    pub fn tell(&self, command: Command) -> Result<(), CommError> {
        self.engine.send(command).map_err(|_| {
            let gone = CommError::failed(self.control.rank(), "the thread of the MPI engine has ended");
            self.control.failure().unwrap_or(gone)
        })
    }
}

impl seat::World for World {
    type Group = Group;

    fn timeout(&self) -> Duration {
        self.control.timeout()
    }

    fn failure(&self) -> Option<CommError> {
        self.control.failure()
    }

    fn abort(&self, error: CommError) -> CommError {
        self.control.fail(error)
    }

    fn activity(&self, _rank: usize) -> MutexGuard<'_, Activity> {
        self.control.activity()
    }

    fn counters(&self, _rank: usize) -> MutexGuard<'_, Counters> {
        self.control.counters()
    }

    fn post(self: &Arc<Self>, group: &Arc<Group>, posting: Posting) -> Result<Box<dyn Posted>, CommError> {
        group.called.fetch_add(1, Ordering::Relaxed);
        let Posting {
            rank,
            transfers,
            plans,
            call,
        } = posting;
        let size = group.ranks.len();
        let fingerprint = Fingerprint::new(call.site.clone(), &transfers);
        let ops: Vec<Collective> = transfers.iter().map(|transfer| transfer.op.clone()).collect();
        let (buffers, devices) = into_host(transfers.into_iter().map(|transfer| transfer.buffer))?;
        let sender = ops[0].sender(rank, size);
        let needs = match sender {
            _ if ops[0] == Collective::Barrier => Needs::Everyone,
            None => Needs::Everyone,
            Some(sender) if sender == rank => Needs::Nobody,
            Some(sender) => Needs::Sender(sender),
        };
        let (own, landing, round) = match sender {
            Some(_) => {
                let round = hand_over(&ops[0], &buffers, size, rank);
                (Own::Kept(buffers.clone()), Landing::default(), round)
            }
            None => Own::place(&ops, plans, &buffers, size, rank)?,
        };
        let slot = Slot::new(&group.ranks, rank, &needs);
        let (inputs, sums) = (own.inputs(), own.sums());
        let first = Call::new(group.clone(), rank, call.clone(), round, landing, slot.clone());
        self.tell(Command::Call(Box::new(first.compared(
            fingerprint,
            needs,
            inputs,
            sums,
        ))))?;
        Ok(Box::new(UnderWay {
            world: self.clone(),
            group: group.clone(),
            rank,
            call,
            slot,
            own,
            devices,
        }))
    }

    fn subgroup(
        &self,
        parent: &Group,
        _by: usize,
        ranks: &[usize],
        axis: &str,
        nth: u64,
    ) -> Result<Arc<Group>, CommError> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        let mut id = DefaultHasher::new();
        (parent.id, sorted, nth).hash(&mut id);
        let group = Group::new(id.finish(), ranks.to_vec(), axis);
        lock(&self.groups).push(group.clone());
        self.tell(Command::Found(group.clone()))?;
        Ok(group)
    }
}

/// Per tensor, where its device wants the result.
pub type Devices = Vec<Option<Arc<dyn DeviceTensor>>>;

/// Tensors in host memory, for a library that reaches no other; and where they came from.
fn into_host(buffers: impl Iterator<Item = Buffer>) -> Result<(Vec<Buffer>, Devices), CommError> {
    let (mut host, mut devices) = (Vec::new(), Vec::new());
    for buffer in buffers {
        match buffer.storage() {
            Storage::Host(_) => {
                host.push(buffer);
                devices.push(None);
            }
            Storage::Device(tensor) => {
                host.push(tensor.to_host()?);
                devices.push(Some(tensor.clone()));
            }
        }
    }
    Ok((host, devices))
}
