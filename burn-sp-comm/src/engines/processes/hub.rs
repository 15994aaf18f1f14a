//! The hub, on rank 0: one thread that hears all ranks and tells all of them the same.

use super::gate::{Event, Gate, Line};
use super::wire::{Called, Compared, PULSE, ToHub, ToRank, send, silence};
use crate::engines::shared::fingerprint::Signature;
use crate::engines::shared::{deadline, names};
use crate::{Collective, CommError};
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long ranks may take to say what they are doing. They answer at once unless their host is in trouble.
const PATIENCE: Duration = Duration::from_millis(500);

/// How long ranks may take to end after a failure, until all are told that they may: less than they wait for it.
const ENDING: Duration = Duration::from_millis(700);

/// The hub's thread, to be waited for.
pub struct Hub {
    thread: JoinHandle<()>,
}

/// Where ranks find the hub, and by what it knows them.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Address {
    pub addresses: Vec<SocketAddr>,
    pub cookie: u64,
}

impl Hub {
    /// Starts the hub of `size` ranks, and says where to find it: on every address of this host.
    ///
    /// Ranks that have not come within the timeout fail those that have.
    ///
    /// # Errors
    /// If no port can be opened.
    pub fn start(size: usize, timeout: Duration) -> io::Result<(Hub, Address)> {
        // Without IPv6, IPv4 alone.
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)))?;
        let port = listener.local_addr()?.port();
        let mut addresses: Vec<_> = if_addrs::get_if_addrs()?
            .into_iter()
            .filter(|interface| !interface.is_link_local())
            .map(|interface| SocketAddr::new(interface.ip(), port))
            .collect();
        // Loopback first: it is quick to fail, and right for most.
        addresses.sort_by_key(|address| (!address.ip().is_loopback(), address.is_ipv6()));
        // Random enough: the standard library's hasher has keys from the system's generator.
        let cookie = RandomState::new().hash_one(port);
        let (events, inbox) = channel();
        let shut = Arc::new(AtomicBool::new(false));
        let gate = Gate {
            size,
            cookie,
            silence: silence(timeout),
            lines: Arc::default(),
            events,
        };
        let closed = shut.clone();
        std::thread::Builder::new()
            .name("hub's gate".into())
            .spawn(move || gate.stand_open(&listener, &closed))?;
        let board = Board {
            lines: (0..size).map(|_| None).collect(),
            doing: vec![None; size],
            left: vec![Left::No; size],
            welcome: false,
            calls: HashMap::new(),
            verdict: Verdict::None,
            deadline: deadline(timeout),
        };
        let thread = std::thread::Builder::new().name("hub".into()).spawn(move || {
            if catch_unwind(AssertUnwindSafe(|| board.run(&inbox))).is_err() {
                // Without it no rank could tell the others anything. They notice that this process ends.
                std::process::abort();
            }
            shut.store(true, Ordering::Relaxed);
        })?;
        Ok((Hub { thread }, Address { addresses, cookie }))
    }

    /// Waits until the hub has told everyone everything, or given up on who does not listen.
    pub fn join(self) {
        // It has nothing to return, and a panic of it was printed.
        let _ = self.thread.join();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    No,
    /// Its code has ended well; it waits for the others.
    Finished,
    /// Its code has ended after a failure, or its line is closed.
    Ended,
}

/// How the world's failure is coming about.
enum Verdict {
    None,
    /// Everyone has been asked what they are doing; once it is known, `error` makes the report.
    Asked {
        error: Box<dyn FnOnce(String) -> CommError + Send>,
        until: Instant,
    },
    Spoken {
        error: CommError,
        until: Instant,
    },
}

/// A collective that not all members have called.
struct Open {
    first: Compared,
    /// By rank within the group.
    called: Vec<Option<Compared>>,
}

struct Board {
    lines: Vec<Option<Line>>,
    /// The latest answers.
    doing: Vec<Option<String>>,
    left: Vec<Left>,
    /// Whether all ranks have come.
    welcome: bool,
    /// By group and sequence.
    calls: HashMap<(u64, u64), Open>,
    verdict: Verdict,
    /// When all ranks must be there.
    deadline: Instant,
}

impl Board {
    fn run(mut self, inbox: &Receiver<Event>) {
        let mut pulse = Instant::now() + PULSE;
        loop {
            let until = match &self.verdict {
                Verdict::Asked { until, .. } | Verdict::Spoken { until, .. } => *until,
                Verdict::None if !self.welcome => self.deadline,
                Verdict::None => pulse,
            };
            let event = inbox.recv_timeout(until.min(pulse).saturating_duration_since(Instant::now()));
            if Instant::now() >= pulse {
                pulse = Instant::now() + PULSE;
                self.tell_all(&ToRank::Alive);
            }
            match event {
                Ok(event) => self.hear(event),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= until => self.time_is_up(),
                Err(RecvTimeoutError::Timeout) => {}
                // The gate is shut and every line closed.
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if let Verdict::Asked { .. } = self.verdict
                && self.everyone_answered()
            {
                self.time_is_up();
            }
            let done = match &self.verdict {
                Verdict::Spoken { until, .. } => {
                    self.left.iter().all(|left| *left == Left::Ended) || Instant::now() >= *until
                }
                _ => self.left.iter().all(|left| *left == Left::Finished),
            };
            if done {
                return self.tell_all(&ToRank::AllEnded);
            }
        }
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Line { rank, line } => {
                self.lines[rank] = Some(line);
                if let Verdict::Spoken { error, .. } = &self.verdict {
                    // It comes too late, and hears why.
                    tell(&mut self.lines[rank], &ToRank::Failed(error.clone()));
                } else if !self.welcome && self.lines.iter().all(Option::is_some) {
                    self.welcome = true;
                    self.tell_all(&ToRank::Welcome);
                }
            }
            Event::Message { rank, message } => self.hear_rank(rank, message),
            // It gave up on this line and has another.
            Event::Closed { rank, number, .. }
                if self.lines[rank].as_ref().is_some_and(|line| line.number != number) => {}
            // Or it will have one, or be missed.
            Event::Closed { rank, .. } if !self.welcome => self.lines[rank] = None,
            Event::Closed { rank, why, .. } => {
                let before = std::mem::replace(&mut self.left[rank], Left::Ended);
                if before != Left::Ended {
                    let error = move |doing| CommError::Died {
                        rank,
                        report: format!("{why}. {doing}"),
                    };
                    self.doing[rank] = Some("dead".into());
                    self.ask(Box::new(error));
                }
            }
        }
    }

    fn hear_rank(&mut self, rank: usize, message: ToHub) {
        match message {
            ToHub::Hello { .. } | ToHub::Alive => {}
            ToHub::Failed(error) => self.speak(error),
            ToHub::Late { waiting, left } => self.ask(Box::new(move |doing| late(&waiting, left, &doing))),
            ToHub::Doing(doing) => self.doing[rank] = Some(doing),
            ToHub::Called(called) => self.compare(rank, called),
            ToHub::Letter { to, about, bytes } => {
                let letter = ToRank::Letter {
                    from: rank,
                    about,
                    bytes,
                };
                let lines = self.lines.iter_mut().enumerate();
                lines
                    .filter(|(rank, _)| to.contains(rank))
                    .for_each(|(_, line)| tell(line, &letter));
            }
            ToHub::Finished { called, doing } => self.finished(rank, called, doing),
            ToHub::Ended => self.left[rank] = Left::Ended,
        }
    }

    fn finished(&mut self, rank: usize, called: Called, doing: String) {
        self.left[rank] = Left::Finished;
        self.doing[rank] = Some(doing);
        self.tell_all(&ToRank::Finished { rank, called });
    }

    /// Asks everyone what they are doing, to report it with `error`; unless a failure is already on its way.
    fn ask(&mut self, error: Box<dyn FnOnce(String) -> CommError + Send>) {
        if !matches!(self.verdict, Verdict::None) {
            return;
        }
        let until = Instant::now() + PATIENCE;
        self.verdict = Verdict::Asked { error, until };
        for rank in 0..self.left.len() {
            if self.left[rank] == Left::No {
                self.doing[rank] = None;
            }
        }
        self.tell_all(&ToRank::WhatAreYouDoing);
    }

    fn everyone_answered(&self) -> bool {
        self.doing
            .iter()
            .zip(&self.left)
            .all(|(doing, left)| doing.is_some() || *left != Left::No)
    }

    fn time_is_up(&mut self) {
        match std::mem::replace(&mut self.verdict, Verdict::None) {
            // Only a pulse was due.
            Verdict::None if self.welcome => {}
            Verdict::None => {
                let (absent, present): (Vec<usize>, Vec<usize>) =
                    (0..self.lines.len()).partition(|rank| self.lines[*rank].is_none());
                let report = format!(
                    "{} did not come to the start, where {} waited",
                    names(absent),
                    names(present)
                );
                self.speak(CommError::Timeout { report });
            }
            Verdict::Asked { error, .. } => {
                let line = |(rank, doing): (usize, &Option<String>)| {
                    let doing = doing.as_deref().unwrap_or("does not answer");
                    format!("rank {rank}: {doing}")
                };
                let doing: Vec<_> = self.doing.iter().enumerate().map(line).collect();
                self.speak(error(doing.join("; ")));
            }
            spoken @ Verdict::Spoken { .. } => self.verdict = spoken,
        }
    }

    /// Fails the world, unless it has failed already.
    fn speak(&mut self, error: CommError) {
        if matches!(self.verdict, Verdict::Spoken { .. }) {
            return;
        }
        self.tell_all(&ToRank::Failed(error.clone()));
        // Those who have not come yet have until the deadline to hear of it.
        let until = Instant::now() + ENDING;
        let until = if self.welcome { until } else { until.max(self.deadline) };
        self.verdict = Verdict::Spoken { error, until };
    }

    /// Compares a call with what other members of the group called there.
    fn compare(&mut self, rank: usize, call: Compared) {
        let key = (call.group, call.sequence);
        let member = call.members.iter().position(|member| *member == rank);
        let Some(member) = member else { return };
        // Tensors that are handed over may have any shape, which their receivers learn here; and whoever waits in a
        // barrier learns here that the others have come.
        let size = call.members.len();
        let needs = |receiver: usize, tensor: &Signature| {
            tensor.op == Collective::Barrier || tensor.op.sender(receiver, size) == Some(member)
        };
        let told = ToRank::Called {
            rank,
            called: call.clone(),
        };
        for (receiver, other) in call.members.iter().enumerate().filter(|(_, other)| **other != rank) {
            if call.fingerprint.tensors.iter().any(|tensor| needs(receiver, tensor)) {
                tell(&mut self.lines[*other], &told);
            }
        }
        let open = self.calls.entry(key).or_insert_with(|| Open {
            first: call.clone(),
            called: vec![None; call.members.len()],
        });
        let difference = match open.first.members == call.members && open.first.axis == call.axis {
            true => open.first.fingerprint.difference(&call.fingerprint),
            false => Some("subgroup"),
        };
        // By the order of the first who called, which is that of all if they agree.
        if let Some(place) = open.first.members.iter().position(|member| *member == rank) {
            open.called[place] = Some(call);
        }
        if let Some(difference) = difference {
            let line = |(rank, called): (&usize, &Option<Compared>)| match called {
                Some(call) if difference == "subgroup" => {
                    format!("rank {rank}: subgroup {:?} over {}", call.members, call.axis)
                }
                Some(call) => format!("rank {rank}: {}", call.fingerprint.describe(&call.axis, difference)),
                None => format!("rank {rank}: not there yet"),
            };
            let report: Vec<_> = open.first.members.iter().zip(&open.called).map(line).collect();
            let error = CommError::Mismatch {
                difference: difference.into(),
                report: report.join("; "),
            };
            return self.speak(error);
        }
        if open.called.iter().all(Option::is_some) {
            self.calls.remove(&key);
        }
    }

    fn tell_all(&mut self, message: &ToRank) {
        self.lines.iter_mut().for_each(|line| tell(line, message));
    }
}

/// The error of a rank that waits in vain.
pub fn late(waiting: &str, left: Option<usize>, doing: &str) -> CommError {
    let report = format!("{waiting}. {doing}");
    match left {
        Some(rank) => CommError::Departed { rank, report },
        None => CommError::Timeout { report },
    }
}

/// A rank that cannot be told has died or is stuck. What is left of a message would spoil the next one, so its line is
/// closed, and what listens to it notices.
fn tell(line: &mut Option<Line>, message: &ToRank) {
    if let Some(Line { stream, .. }) = line
        && send(stream, message).is_err()
    {
        // It may be closed already.
        let _ = stream.shutdown(Shutdown::Both);
        *line = None;
    }
}
