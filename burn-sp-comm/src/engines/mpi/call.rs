//! A call of a collective, as the engine's thread sees it.

use super::area::Area;
use super::header::Encoded;
use super::posting::Sums;
use super::world::Group;
use crate::copy::Output;
use crate::engines::shared::activity;
use crate::engines::shared::fingerprint::Fingerprint;
use crate::engines::shared::lock;
use crate::exchange::Place;
use crate::{Buffer, CommError};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// What goes to whom in a call, by rank within the group: areas in the order of the receiver's plan.
pub struct Round {
    pub sends: Vec<Vec<Area>>,
    pub receives: Vec<Vec<Area>>,
    /// Memory that areas lie in and that is nobody else's.
    pub packed: Vec<Output>,
}

impl Round {
    pub fn new(size: usize) -> Round {
        Round {
            sends: vec![Vec::new(); size],
            receives: vec![Vec::new(); size],
            packed: Vec::new(),
        }
    }
}

/// The messages in which areas of these bytes travel between two ranks: both sides know the bytes, so they agree.
///
/// Areas travel one by one, as libraries move a run of bytes from one process to another in a single copy; many small
/// ones travel together.
pub fn messages(bytes: &[usize]) -> Vec<Range<usize>> {
    const FEW: usize = 8;
    const LARGE: usize = 32 << 10;
    let total: usize = bytes.iter().sum();
    if total == 0 {
        return Vec::new();
    }
    if bytes.len() <= FEW || total / bytes.len() >= LARGE {
        let filled = (0..bytes.len()).filter(|area| bytes[*area] > 0);
        return filled.map(|area| area..area + 1).collect();
    }
    vec![0..bytes.len()]
}

/// The memory that a call writes: results, and terms of sums by their place.
#[derive(Default)]
pub struct Landing {
    pub outputs: Vec<(Output, Vec<usize>)>,
    pub terms: BTreeMap<Place, (Output, Vec<usize>)>,
}

/// Whose fingerprint must be there before a call is over for its rank. The others' are compared all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    Everyone,
    Sender(usize),
    Nobody,
}

/// Where a rank waits for its call.
pub struct Slot {
    state: Mutex<State>,
    signal: Condvar,
}

struct State {
    /// Global ranks from which something is missing.
    missing: Vec<usize>,
    outcome: Option<Result<Landing, CommError>>,
}

impl Slot {
    pub fn new(ranks: &[usize], rank: usize, needs: &Needs) -> Arc<Slot> {
        let needed = |other: &usize| match needs {
            Needs::Everyone => *other != rank,
            Needs::Sender(sender) => other == sender,
            Needs::Nobody => false,
        };
        let missing = (0..ranks.len()).filter(needed).map(|other| ranks[other]).collect();
        Arc::new(Slot {
            state: Mutex::new(State { missing, outcome: None }),
            signal: Condvar::new(),
        })
    }

    /// More is needed of these global ranks.
    pub fn expect(&self, ranks: impl IntoIterator<Item = usize>) {
        lock(&self.state).missing.extend(ranks);
    }

    /// All that was needed of this rank is there.
    pub fn arrived(&self, rank: usize) {
        lock(&self.state).missing.retain(|missing| *missing != rank);
    }

    pub fn end(&self, outcome: Result<Landing, CommError>) {
        lock(&self.state).outcome = Some(outcome);
        self.signal.notify_all();
    }

    /// Waits for the outcome, at most so long; on failure, says which ranks are missing.
    pub fn wait(&self, at_most: Duration) -> Result<Result<Landing, CommError>, Vec<usize>> {
        let mut state = lock(&self.state);
        if state.outcome.is_none() {
            state = self
                .signal
                .wait_timeout(state, at_most)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.outcome.take().ok_or_else(|| state.missing.clone())
    }
}

/// A call on the engine's thread.
pub struct Call {
    pub group: Arc<Group>,
    /// Within the group.
    pub rank: usize,
    pub call: activity::Call,
    /// None in the second round of a call, for which all have been compared.
    pub fingerprint: Option<Fingerprint>,
    pub needs: Needs,
    pub round: Round,
    /// What the messages are sent from, held for as long as they are under way.
    #[expect(dead_code, reason = "it is there to be dropped with the call")]
    pub inputs: Vec<Buffer>,
    pub landing: Option<Landing>,
    pub slot: Arc<Slot>,
    /// By rank within the group: whose fingerprints are still to come.
    pub awaited: Vec<bool>,
    /// The fingerprints that have come.
    pub heard: HashMap<usize, Fingerprint>,
    /// Bytes of fingerprints that have come in part or are to come.
    pub headers: HashMap<usize, Encoded>,
    /// How many messages with tensors this rank waits for, by sender.
    pub incoming: Vec<usize>,
    /// How many messages to every member are not over: fingerprints and tensors on their way out.
    pub outgoing: Vec<usize>,
    /// Of an all-reduce: how its first round becomes the second.
    pub sums: Option<Sums>,
    /// Own fingerprint, as it is sent.
    pub encoded: Encoded,
}

impl Call {
    /// One round of a call: messages and the memory that they fill.
    pub fn new(
        group: Arc<Group>,
        rank: usize,
        call: activity::Call,
        round: Round,
        landing: Landing,
        slot: Arc<Slot>,
    ) -> Call {
        let size = group.ranks.len();
        let incoming = round
            .receives
            .iter()
            .map(|areas| messages(&bytes(areas)).len())
            .collect();
        Call {
            group,
            rank,
            call,
            fingerprint: None,
            needs: Needs::Nobody,
            round,
            inputs: Vec::new(),
            landing: Some(landing),
            slot,
            awaited: vec![false; size],
            heard: HashMap::new(),
            headers: HashMap::new(),
            incoming,
            outgoing: vec![0; size],
            sums: None,
            encoded: Default::default(),
        }
    }

    /// Makes it a first round: fingerprints are compared before tensors travel. `inputs` are what is sent from; `sums` make
    /// the second round, if there is one.
    pub fn compared(self, fingerprint: Fingerprint, needs: Needs, inputs: Vec<Buffer>, sums: Option<Sums>) -> Call {
        let awaited = (0..self.awaited.len()).map(|other| other != self.rank).collect();
        Call {
            fingerprint: Some(fingerprint),
            needs,
            inputs,
            sums,
            awaited,
            ..self
        }
    }

    /// Whether the rank that called has all it needs. Of a second round also what it sends, as that is its result.
    pub fn is_ready(&self) -> bool {
        let fingerprints = match self.needs {
            Needs::Everyone => !self.awaited.contains(&true),
            Needs::Sender(sender) => !self.awaited[sender],
            Needs::Nobody => true,
        };
        fingerprints
            && self.incoming.iter().all(|messages| *messages == 0)
            && (self.fingerprint.is_some() || self.is_sent())
    }

    /// Whether there is nothing left to do for anyone.
    pub fn is_over(&self) -> bool {
        self.landing.is_none() && self.is_sent() && !self.awaited.contains(&true)
    }

    fn is_sent(&self) -> bool {
        self.outgoing.iter().all(|messages| *messages == 0)
    }

    /// Whether tensors are on their way.
    pub fn is_moving(&self) -> bool {
        !self.is_sent() || self.incoming.iter().any(|messages| *messages > 0)
    }
}

/// Who called what, as far as it is known.
impl Call {
    pub fn describe(&self, difference: &str) -> String {
        let (ranks, axis) = (&self.group.ranks, &self.group.axis);
        let called = |(member, rank): (usize, &usize)| {
            let own = self.fingerprint.as_ref().filter(|_| member == self.rank);
            match own.or(self.heard.get(&member)) {
                Some(fingerprint) => format!("rank {rank}: {}", fingerprint.describe(axis, difference)),
                None => format!("rank {rank}: not there yet"),
            }
        };
        let lines: Vec<_> = ranks.iter().enumerate().map(called).collect();
        lines.join("; ")
    }
}

/// Of every area.
pub fn bytes(areas: &[Area]) -> Vec<usize> {
    areas.iter().map(Area::bytes).collect()
}
