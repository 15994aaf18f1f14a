//! This process's rank in the world: groups, and calls on their way to the engine's thread.

use super::call::{Call, Needs, Slot};
use super::posting::{Placed, UnderWay, hand_over, place};
use super::progress::Command;
use crate::buffer::Storage;
use crate::engines::processes::{self, Control, Groups, ProcessWorld};
use crate::engines::shared::fingerprint::Fingerprint;
use crate::engines::shared::seat::{Posted, Posting};
use crate::{Buffer, Collective, CommError, DeviceTensor};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};

/// This process's rank in the world.
pub struct World {
    pub control: Arc<Control>,
    engine: Sender<Command>,
    groups: Groups<Channel>,
}

/// A group that this process's rank is in.
pub type Group = processes::Group<Channel>;

/// Sets a group's messages apart from those of others. Its first member chooses it and tells the others.
pub type Channel = OnceLock<usize>;

/// All ranks, in the process's `nth` launch. Its channel needs no agreement.
pub fn everyone(size: usize, nth: u64) -> Arc<Group> {
    Group::everyone(size, nth, Channel::from(0))
}

impl World {
    pub fn new(control: Arc<Control>, engine: Sender<Command>, everyone: &Arc<Group>) -> Arc<Self> {
        Arc::new(World {
            control,
            engine,
            groups: Groups::new(everyone),
        })
    }

    /// Hands something to the engine's thread, which lives as long as the process.
    pub fn tell(&self, command: Command) -> Result<(), CommError> {
        self.engine.send(command).map_err(|_| {
            let gone = CommError::failed(self.control.rank(), "the thread of the MPI engine has ended");
            self.control.failure().unwrap_or(gone)
        })
    }
}

impl ProcessWorld for World {
    type Extra = Channel;

    fn control(&self) -> &Control {
        &self.control
    }

    fn groups(&self) -> &Groups<Channel> {
        &self.groups
    }

    fn extra(&self, _parent: &Group, _ranks: &[usize]) -> Channel {
        Channel::new()
    }

    fn found(&self, group: &Arc<Group>) -> Result<(), CommError> {
        self.tell(Command::Found(group.clone()))
    }

    fn send_off(self: &Arc<Self>, group: &Arc<Group>, posting: Posting) -> Result<Box<dyn Posted>, CommError> {
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
        let slot = Slot::new(&group.ranks, rank, &needs);
        let Placed {
            own,
            landing,
            round,
            inputs,
            sums,
        } = match sender {
            Some(_) => hand_over(&ops[0], buffers, size, rank),
            None => place(&ops, plans, buffers, size, rank)?,
        };
        let first = Call::new(group.clone(), rank, call.clone(), round, landing, slot.clone());
        let first = first.compared(fingerprint, needs, inputs, sums);
        self.tell(Command::Call(Box::new(first)))?;
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
