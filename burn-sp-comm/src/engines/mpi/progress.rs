//! The engine's thread: makes all calls of the MPI library, and moves messages on while ranks compute.
//!
//! A call begins with its fingerprint, which goes to all members of its group. When a member's has come and agrees, the
//! tensors to and from it go on their way: nothing moves between ranks that do not agree. A rank waits for its call on
//! a [`Slot`](super::call::Slot), not here, so it blocks without spinning; this thread looks often while tensors move,
//! seldom while someone is late, and sleeps while there is nothing to do.

use super::area::Area;
use super::call::{Call, bytes, messages};
use super::groups::Groups;
use super::header::{FIRST, decode, encode, rest};
use super::library::{Fault, Library, Requests};
use super::tags::{Kind, is_too_far, tag};
use super::world::Group;
use crate::CommError;
use crate::copy::Output;
use crate::engines::processes::Control;
use crate::engines::shared::fingerprint::Fingerprint;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// What the engine's thread is asked to do.
pub enum Command {
    /// Rank 0's bytes for every rank; all ranks ask for it. They are told how long they may be by [`SHARED`].
    Share {
        bytes: Vec<u8>,
        reply: Sender<Result<Vec<u8>, String>>,
    },
    /// A launch begins: failures go to this line.
    Launch(Arc<Control>),
    /// A group that this rank is in.
    Found(Arc<Group>),
    /// A round of a call.
    Call(Box<Call>),
    /// Reply when nothing is under way, but for what ranks owe that have left.
    Drain(Sender<()>),
    /// End MPI.
    Stop(Sender<()>),
}

/// The most bytes that can be shared.
pub const SHARED: usize = 4096;

/// How long after the last event it looks again without pause: while tensors move, and while a rank is late.
const MOVING: Duration = Duration::from_millis(2);
const LATE: Duration = Duration::from_micros(50);

/// How long a rank that has heard of a disagreement listens on, so that all that have called are in the report.
const HEARING: Duration = Duration::from_millis(5);

/// The pauses after that.
const PAUSE: Duration = Duration::from_micros(50);
const LONG_PAUSE: Duration = Duration::from_micros(100);

/// The pauses while nothing is under way: some libraries send in later calls what they took in earlier ones.
const IDLE: Duration = Duration::from_millis(10);

/// What a message is to whom.
#[derive(Clone, Copy)]
pub(super) enum Message {
    /// To the call of this number: from or to a member.
    Header {
        call: u64,
        member: usize,
    },
    HeaderRest {
        call: u64,
        member: usize,
    },
    Tensors {
        call: u64,
        member: usize,
    },
    Sent {
        call: u64,
        member: usize,
    },
    Founding,
    Founded,
}

/// The engine's thread.
pub struct Engine {
    pub(super) library: Library,
    commands: Receiver<Command>,
    control: Option<Arc<Control>>,
    pub(super) requests: Requests<Message>,
    calls: HashMap<u64, Call>,
    next: u64,
    /// Calls that cannot begin: of groups whose channel is not known, or too far ahead of others of their group.
    held: Vec<Call>,
    pub(super) groups: Groups,
    draining: Vec<Sender<()>>,
    /// A call on which members disagree, in what, and since when that is known.
    dispute: Option<(u64, &'static str, Instant)>,
    /// When something last happened.
    last: Instant,
}

impl Engine {
    pub fn new(library: Library, commands: Receiver<Command>) -> Engine {
        Engine {
            library,
            commands,
            control: None,
            requests: Requests::new(),
            calls: HashMap::new(),
            next: 0,
            held: Vec::new(),
            groups: Groups::new(),
            draining: Vec::new(),
            dispute: None,
            last: Instant::now(),
        }
    }

    /// Works until the process ends.
    pub fn run(&mut self) {
        loop {
            match self.command() {
                Ok(Some(Command::Stop(done))) => return self.stop(&done),
                Ok(Some(command)) => {
                    self.last = Instant::now();
                    let worked = self.obey(command);
                    self.report(worked);
                }
                Ok(None) => {}
                // Every handle is gone, as none is before the process ends.
                Err(()) => return,
            }
            let worked = self.work();
            self.report(worked);
            if self.control.as_ref().is_some_and(|control| control.failure().is_some()) {
                self.give_up();
            }
        }
    }

    /// The next command; waits for it as long as the messages allow.
    fn command(&mut self) -> Result<Option<Command>, ()> {
        let idle = self.calls.is_empty() && self.held.is_empty() && self.draining.is_empty() && self.groups.is_idle();
        let moving = self.calls.values().any(Call::is_moving);
        let quiet = self.last.elapsed();
        let pause = match moving {
            _ if idle => IDLE,
            true if quiet < MOVING => Duration::ZERO,
            false if quiet < LATE => Duration::ZERO,
            true => PAUSE,
            false => LONG_PAUSE,
        };
        if pause.is_zero() {
            // Another process of this host may be the one that is waited for.
            std::thread::yield_now();
        }
        match self.commands.recv_timeout(pause) {
            Ok(command) => Ok(Some(command)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(()),
        }
    }

    fn obey(&mut self, command: Command) -> Result<(), Fault> {
        match command {
            Command::Share { mut bytes, reply } => {
                bytes.resize(SHARED, 0);
                let shared = self.library.share(&mut bytes).and_then(|()| self.renew());
                // If nobody listens any more, the launch has failed.
                let _ = reply.send(shared.map(|()| bytes).map_err(|fault| fault.to_string()));
                Ok(())
            }
            Command::Launch(control) => {
                self.control = Some(control);
                Ok(())
            }
            Command::Found(group) => self.found(group),
            Command::Call(call) => self.begin(*call),
            Command::Drain(reply) => {
                self.draining.push(reply);
                Ok(())
            }
            Command::Stop(_) => Ok(()),
        }
    }

    /// Nothing of an earlier launch can be taken for something of this one. All ranks call it.
    fn renew(&mut self) -> Result<(), Fault> {
        self.library.renew()?;
        // The receive for groups of the last launch still knows its memory.
        std::mem::forget(std::mem::replace(&mut self.groups, Groups::new()));
        self.expect_founding()
    }

    pub(super) fn begin(&mut self, call: Call) -> Result<(), Fault> {
        let far = |other: &Call| other.group.id == call.group.id && is_too_far(call.call.sequence, other.call.sequence);
        let (Some(&channel), false) = (call.group.extra.get(), self.calls.values().any(far)) else {
            self.held.push(call);
            return Ok(());
        };
        let number = self.next;
        self.next += 1;
        // From now on it is kept until all its messages are over.
        let call = self.calls.entry(number).or_insert(call);
        let (rank, sequence, size) = (call.rank, call.call.sequence, call.group.ranks.len());
        let Some(fingerprint) = &call.fingerprint else {
            for member in 0..size {
                self.exchange(number, member)?;
            }
            return self.look(number);
        };
        call.encoded = encode(fingerprint).map_err(Fault::other)?;
        for member in (0..size).filter(|member| *member != rank) {
            let peer = call.group.ranks[member];
            let (first, _) = call
                .headers
                .entry(member)
                .or_insert((vec![0; FIRST].into(), Box::default()));
            let area = Area::dense(first.as_mut_ptr(), FIRST);
            // SAFETY: the call keeps these bytes until all its messages are over.
            let request = unsafe {
                self.library
                    .receive(&[area], Some(peer), tag(channel, sequence, Kind::Header))
            }?;
            self.requests.push(request, Message::Header { call: number, member });
            let (first, more) = &mut call.encoded;
            for (bytes, kind) in [(first, Kind::Header), (more, Kind::HeaderRest)] {
                if !bytes.is_empty() {
                    let area = Area::dense(bytes.as_mut_ptr(), bytes.len());
                    // SAFETY: as above.
                    let request = unsafe { self.library.send(&[area], peer, tag(channel, sequence, kind)) }?;
                    self.requests.push(request, Message::Sent { call: number, member });
                    call.outgoing[member] += 1;
                }
            }
        }
        self.look(number)
    }

    /// Begins what was held back, as far as it can.
    pub(super) fn resume(&mut self) -> Result<(), Fault> {
        for call in std::mem::take(&mut self.held) {
            self.begin(call)?;
        }
        Ok(())
    }

    /// Sends tensors to a member and receives from it.
    fn exchange(&mut self, number: u64, member: usize) -> Result<(), Fault> {
        let Some(call) = self.calls.get_mut(&number) else {
            return Ok(());
        };
        let channel = call.group.extra.get().copied().unwrap_or_default();
        let kind = if call.fingerprint.is_some() {
            Kind::First
        } else {
            Kind::Second
        };
        let (peer, sequence) = (call.group.ranks[member], call.call.sequence);
        let (sends, receives) = (call.round.sends[member].clone(), call.round.receives[member].clone());
        let (outgoing, incoming) = (messages(&bytes(&sends)), messages(&bytes(&receives)));
        call.outgoing[member] += outgoing.len();
        call.incoming[member] = incoming.len();
        // Messages of one kind between two ranks arrive in the order in which they were sent.
        let tag = tag(channel, sequence, kind);
        for message in incoming {
            // SAFETY: the call keeps the memory of its results until all its messages are over.
            let request = unsafe { self.library.receive(&receives[message], Some(peer), tag) }?;
            self.requests.push(request, Message::Tensors { call: number, member });
        }
        for message in outgoing {
            // SAFETY: the call keeps its inputs, which nobody changes, until all its messages are over.
            let request = unsafe { self.library.send(&sends[message], peer, tag) }?;
            self.requests.push(request, Message::Sent { call: number, member });
        }
        Ok(())
    }

    /// Moves messages on and takes in what has come.
    fn work(&mut self) -> Result<(), Fault> {
        let over = self.requests.completed()?;
        if !over.is_empty() {
            self.last = Instant::now();
        }
        for message in over {
            match message {
                Message::Header { call, member } => self.header_came(call, member)?,
                Message::HeaderRest { call, member } => self.agree(call, member)?,
                Message::Tensors { call, member } => {
                    if let Some(call) = self.calls.get_mut(&call) {
                        call.incoming[member] -= 1;
                    }
                    self.look(call)?;
                }
                Message::Sent { call, member } => {
                    if let Some(call) = self.calls.get_mut(&call) {
                        // Of one that has left nobody counts them any more.
                        call.outgoing[member] = call.outgoing[member].saturating_sub(1);
                    }
                    self.look(call)?;
                }
                Message::Founding => self.founding_came()?,
                Message::Founded => self.founding_went(),
            }
        }
        if let Some((number, difference, since)) = self.dispute
            && since.elapsed() > HEARING
            && let Some(call) = self.calls.get(&number)
        {
            self.fail(CommError::Mismatch {
                difference: difference.into(),
                report: call.describe(difference),
            });
        }
        if !self.draining.is_empty() {
            self.drain();
        }
        Ok(())
    }

    /// The first message of a member's fingerprint has come.
    fn header_came(&mut self, number: u64, member: usize) -> Result<(), Fault> {
        let Some(call) = self.calls.get_mut(&number) else {
            return Ok(());
        };
        let channel = call.group.extra.get().copied().unwrap_or_default();
        let (peer, sequence) = (call.group.ranks[member], call.call.sequence);
        let Some((first, more)) = call.headers.get_mut(&member) else {
            return Ok(());
        };
        let missing = rest(first);
        if missing == 0 {
            return self.agree(number, member);
        }
        *more = vec![0; missing].into();
        let area = Area::dense(more.as_mut_ptr(), missing);
        let tag = tag(channel, sequence, Kind::HeaderRest);
        // SAFETY: the call keeps these bytes until all its messages are over.
        let request = unsafe { self.library.receive(&[area], Some(peer), tag) }?;
        self.requests
            .push(request, Message::HeaderRest { call: number, member });
        Ok(())
    }

    /// A member's fingerprint is there: the tensors may travel, if it agrees.
    fn agree(&mut self, number: u64, member: usize) -> Result<(), Fault> {
        let Some(call) = self.calls.get_mut(&number) else {
            return Ok(());
        };
        let Some((first, more)) = call.headers.remove(&member) else {
            return Ok(());
        };
        let theirs = decode(&first, &more).map_err(Fault::other)?;
        let Some(own) = &call.fingerprint else { return Ok(()) };
        let (difference, handing) = (
            own.difference(&theirs),
            own.tensors[0].op.sender(call.rank, call.group.ranks.len()),
        );
        if difference.is_none() && handing == Some(member) {
            expect(call, member, &theirs);
        }
        call.heard.insert(member, theirs);
        if let Some(difference) = difference {
            self.dispute.get_or_insert((number, difference, Instant::now()));
            return Ok(());
        }
        call.awaited[member] = false;
        self.exchange(number, member)?;
        self.look(number)
    }

    /// Hands the results over, if they are there, and takes the call off the list if it is over.
    fn look(&mut self, number: u64) -> Result<(), Fault> {
        let Some(call) = self.calls.get_mut(&number) else {
            return Ok(());
        };
        for (member, rank) in call.group.ranks.iter().enumerate() {
            if !call.awaited[member] && call.incoming[member] == 0 {
                call.slot.arrived(*rank);
            }
        }
        let mut second = None;
        if call.is_ready()
            && let Some(landing) = call.landing.take()
        {
            match call.sums.take() {
                None => call.slot.end(Ok(landing)),
                Some(sums) => {
                    let (group, slot) = (call.group.clone(), call.slot.clone());
                    let others = group
                        .ranks
                        .iter()
                        .enumerate()
                        .filter(|(member, _)| *member != call.rank);
                    slot.expect(others.map(|(_, rank)| *rank));
                    let (round, landing) = sums.second_round(landing, group.ranks.len(), call.rank);
                    second = Some(Call::new(group, call.rank, call.call.clone(), round, landing, slot));
                }
            }
        }
        if call.is_over() {
            self.calls.remove(&number);
        }
        if let Some(second) = second {
            self.begin(second)?;
        }
        if self.held.is_empty() { Ok(()) } else { self.resume() }
    }

    /// Replies once nothing is under way. Ranks that have left without a call owe nothing to it, and are owed nothing.
    fn drain(&mut self) {
        let Some(control) = self.control.clone() else { return };
        let mut over = Vec::new();
        for (number, call) in &mut self.calls {
            for (member, rank) in call.group.ranks.iter().enumerate() {
                if call.awaited[member] && control.has_left(*rank, call.group.id, call.call.sequence) {
                    call.awaited[member] = false;
                    call.outgoing[member] = 0;
                    // The receive may still know its memory.
                    std::mem::forget(call.headers.remove(&member));
                    over.push((*number, member));
                }
            }
            // Its results will never be whole. This rank's code has ended, so nobody waits for them.
            if over.last().is_some_and(|(left, _)| left == number) {
                std::mem::forget(call.landing.take());
            }
        }
        self.held.retain(|call| {
            let left = |rank: &usize| control.has_left(*rank, call.group.id, call.call.sequence);
            !call.group.ranks.iter().any(left)
        });
        if !over.is_empty() {
            self.requests.cancel(
                |message| matches!(message, Message::Header { call, member } if over.contains(&(*call, *member))),
            );
            for (number, _) in over {
                let looked = self.look(number);
                self.report(looked);
            }
        }
        if self.calls.is_empty() && self.held.is_empty() && self.groups.is_idle() {
            for reply in self.draining.drain(..) {
                // If nobody listens any more, the process is ending.
                let _ = reply.send(());
            }
        }
    }

    fn report(&self, worked: Result<(), Fault>) {
        if let Err(fault) = worked {
            self.fail(CommError::failed(self.library.rank, format!("MPI: {fault}")));
        }
    }

    pub(super) fn fail(&self, error: CommError) {
        if let Some(control) = &self.control {
            control.fail(error);
        }
    }

    /// The world has failed: everyone who waits is told. MPI may still write to what messages were to fill, so it is
    /// never freed; the process is about to end.
    fn give_up(&mut self) {
        let Some(error) = self.control.as_ref().and_then(|control| control.failure()) else {
            return;
        };
        let begun = std::mem::take(&mut self.calls).into_values();
        let waiting = std::mem::take(&mut self.held).into_iter();
        for call in begun.chain(waiting) {
            call.slot.end(Err(error.clone()));
            std::mem::forget(call);
        }
        std::mem::forget(std::mem::replace(&mut self.requests, Requests::new()));
        std::mem::forget(std::mem::replace(&mut self.groups, Groups::new()));
        self.dispute = None;
        for reply in self.draining.drain(..) {
            // If nobody listens any more, the process is ending.
            let _ = reply.send(());
        }
    }

    fn stop(&mut self, done: &Sender<()>) {
        // The receive for the next new group is the only message that nobody sends.
        self.requests.cancel(|message| matches!(message, Message::Founding));
        let ended = self.requests.completed();
        self.report(ended.map(drop));
        self.library.finish();
        // Nobody listens if the process did not wait.
        let _ = done.send(());
    }
}

/// Room for the tensors that a member hands over, now that their shapes are known.
fn expect(call: &mut Call, member: usize, theirs: &Fingerprint) {
    let Some(landing) = &mut call.landing else { return };
    for tensor in &theirs.tensors {
        let mut output = Output::new(&tensor.shape, tensor.dtype);
        let area = Area::of_target(&output.target(), &vec![0; tensor.shape.len()], &tensor.shape);
        call.round.receives[member].push(area);
        landing.outputs.push((output, tensor.shape.clone()));
    }
}
