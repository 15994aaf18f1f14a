//! This process's rank in the world: its groups, and its calls.

use super::calls::{carry_out, elsewhere};
use super::device::{Device, OnDevice};
use super::link::{Link, unique_id};
use super::watch::Watch;
use crate::buffer::Storage;
use crate::engines::processes::{self, Compared, Control, Groups, ProcessWorld};
use crate::engines::shared::activity::Call;
use crate::engines::shared::fingerprint::Fingerprint;
use crate::engines::shared::seat::{Posted, Posting};
use crate::engines::shared::{deadline, lock, names};
use crate::{Buffer, Collective, CommError, CudaOrder};
use burn_std::DType;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// This process's rank in the world.
pub struct World {
    pub control: Arc<Control>,
    pub device: Device,
    pub order: CudaOrder,
    pub watch: Arc<Watch>,
    /// Kept until the end: ending a communicator would end what is under way on it.
    groups: Groups<Known>,
}

/// A group that this process's rank is in.
pub type Group = processes::Group<Known>;

/// What NCCL knows of a group.
#[derive(Default)]
pub struct Known {
    /// The group with the same members from which it was made, in another order perhaps.
    parent: Option<u64>,
    /// Made with the group's first collective, when all members come together: founding a group waits for nobody.
    link: Mutex<Option<Arc<Link>>>,
}

impl World {
    pub fn new(
        control: Arc<Control>,
        number: usize,
        order: CudaOrder,
        everyone: &Arc<Group>,
    ) -> Result<Arc<Self>, CommError> {
        let failed = |what: String| CommError::failed(control.rank(), what);
        let device = Device::open(number).map_err(|error| failed(format!("CUDA device {number}: {error}")))?;
        let watch = Watch::start(&control, &device.context)
            .map_err(|error| failed(format!("the thread that watches NCCL cannot be started: {error}")))?;
        Ok(Arc::new(World {
            control,
            device,
            order,
            watch,
            groups: Groups::new(everyone),
        }))
    }

    /// Ends all communicators; nothing is under way any more.
    pub fn end(&self) {
        self.watch.stop();
        for group in self.groups.list().iter() {
            let link = lock(&group.extra.link).take();
            link.iter().for_each(|link| link.end());
        }
    }

    /// Where this rank waits, and for whom.
    pub fn waiting(&self, group: &Group, call: &Call) -> String {
        let rank = self.control.rank();
        call.waited(rank, self.control.timeout(), &names(group.others(rank)))
    }

    pub fn failed(&self, what: impl fmt::Display) -> CommError {
        self.control.fail(CommError::failed(self.control.rank(), what))
    }

    /// The group's communicator. Made now if there is none yet, which waits for all members.
    pub fn link(&self, group: &Group, call: &Call, deadline: Instant) -> Result<Arc<Link>, CommError> {
        let mut link = lock(&group.extra.link);
        if let Some(link) = &*link {
            return Ok(link.clone());
        }
        let waiting = || self.waiting(group, call);
        self.device
            .context
            .bind_to_thread()
            .map_err(|error| self.failed(format!("CUDA: {error}")))?;
        let (own, size) = (self.control.rank(), group.ranks.len());
        let rank = group.ranks.iter().position(|member| *member == own).unwrap_or(0);
        let parent = group
            .extra
            .parent
            .and_then(|id| self.groups.list().iter().find(|group| group.id == id).cloned());
        let made = match parent {
            // All its members are here, so they can split it.
            Some(parent) => {
                let parent = self.link(&parent, call, deadline)?;
                self.watch.idle()?;
                parent.split(rank, deadline, waiting)?
            }
            // The first member makes an identifier and tells the others.
            None => {
                let first = group.ranks[0];
                let id = if first == own {
                    let id = unique_id().map_err(|fault| self.failed(fault))?;
                    self.control.write(group.others(own).collect(), group.id, id.clone());
                    id
                } else {
                    self.control.read(first, group.id, deadline, waiting)?
                };
                Link::join(&self.control, &id, (rank, size), deadline, waiting)?
            }
        };
        Ok(link.insert(made).clone())
    }

    /// The sender's tensors, without their elements.
    fn handed(
        &self,
        group: &Group,
        call: &Call,
        own: &Fingerprint,
        sender: usize,
        deadline: Instant,
    ) -> Result<Fingerprint, CommError> {
        let waiting = || self.waiting(group, call);
        let called = self
            .control
            .called_by(group.id, call.sequence, group.ranks[sender], deadline, waiting)?;
        match own.difference(&called) {
            None => Ok(called),
            // The hub has compared them before this gets there, and its report is the one that counts.
            Some(difference) => Err(self.control.fail(CommError::Mismatch {
                difference: difference.into(),
                report: [own, &called]
                    .map(|one| one.describe(&group.axis, difference))
                    .join("; "),
            })),
        }
    }
}

impl ProcessWorld for World {
    type Extra = Known;

    fn control(&self) -> &Control {
        &self.control
    }

    fn groups(&self) -> &Groups<Known> {
        &self.groups
    }

    fn extra(&self, parent: &Group, ranks: &[usize]) -> Known {
        Known {
            parent: (ranks.len() == parent.ranks.len()).then_some(parent.id),
            ..Known::default()
        }
    }

    fn send_off(self: &Arc<Self>, group: &Arc<Group>, posting: Posting) -> Result<Box<dyn Posted>, CommError> {
        let Posting {
            rank, transfers, call, ..
        } = posting;
        let deadline = deadline(self.control.timeout());
        let size = group.ranks.len();
        let op = transfers[0].op.clone();
        let fingerprint = Fingerprint::new(call.site.clone(), &transfers);
        self.control.called(Compared {
            group: group.id,
            members: group.ranks.clone(),
            axis: group.axis.to_string(),
            sequence: call.sequence,
            fingerprint: fingerprint.clone(),
        });
        if op == Collective::Barrier {
            return Ok(Box::new(Met {
                world: self.clone(),
                group: group.clone(),
                call,
                buffers: transfers.into_iter().map(|transfer| transfer.buffer).collect(),
            }));
        }
        // Until the call is on its stream.
        self.control.activity().waiting(&call);
        let handed = match op.sender(rank, size) {
            Some(sender) if sender != rank => Some(self.handed(group, &call, &fingerprint, sender, deadline)?),
            _ => None,
        };
        let on_device = handed.as_ref().unwrap_or(&fingerprint).tensors[0].on_device;
        let own = transfers[0].buffer.clone();
        let memory = match (on_device, own.storage()) {
            (false, _) => None,
            (true, Storage::Device(tensor)) => Some(tensor.cuda().ok_or_else(|| self.control.fail(elsewhere()))?),
            (true, Storage::Host(_)) => {
                let fault = "a tensor on a device is sent to this rank, which passed one in host memory: it must pass \
                             any tensor on its device, so that it is known where the result is to be";
                return Err(self.failed(format!("{call}: {fault}")));
            }
        };
        let link = self.link(group, &call, deadline)?;
        let handed: Option<Vec<(Vec<usize>, DType)>> = handed.map(|called| {
            let tensors = called.tensors.into_iter();
            tensors.map(|tensor| (tensor.shape, tensor.dtype)).collect()
        });
        let library = OnDevice {
            world: self,
            group,
            link: &link,
            call: &call,
            memory,
            deadline,
        };
        let results = carry_out(&library, transfers, size, rank, handed.as_deref());
        // What this rank cannot do leaves the others waiting.
        let results = results.map_err(|error| self.control.fail(error))?;
        self.control.activity().computing();
        Ok(Box::new(Enqueued {
            world: self.clone(),
            results,
        }))
    }
}

/// A call whose results are on their way: whatever the device does with them comes after.
struct Enqueued {
    world: Arc<World>,
    results: Vec<Buffer>,
}

impl Posted for Enqueued {
    fn results(self: Box<Self>, _deadline: Instant) -> Result<Vec<Buffer>, CommError> {
        match self.world.control.failure() {
            Some(error) => Err(error),
            None => Ok(self.results),
        }
    }
}

/// A barrier: the hub says who has come to it, as it is the ranks' code that is to meet, not their devices.
struct Met {
    world: Arc<World>,
    group: Arc<Group>,
    call: Call,
    buffers: Vec<Buffer>,
}

impl Posted for Met {
    fn results(self: Box<Self>, deadline: Instant) -> Result<Vec<Buffer>, CommError> {
        let Met { world, group, call, .. } = &*self;
        for other in group.others(world.control.rank()) {
            let waiting = || world.waiting(group, call);
            world
                .control
                .called_by(group.id, call.sequence, other, deadline, waiting)?;
        }
        Ok(self.buffers)
    }
}
