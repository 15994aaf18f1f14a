//! What every rank was last doing, for reports.

use super::fingerprint::Place;
use super::text;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// One call of a collective.
#[derive(Clone, Debug)]
pub struct Call {
    pub name: &'static str,
    pub axis: Arc<str>,
    /// The number of the call within its group.
    pub sequence: u64,
    pub site: Place,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} over {} (call {}) at {}",
            self.name, self.axis, self.sequence, self.site
        )
    }
}

impl Call {
    /// `rank 0 waited 60 s in all_gather over world (call 3) at src/a.rs:1:2 for rank 2`
    pub fn waited(&self, rank: usize, timeout: Duration, whom: &str) -> String {
        format!("rank {rank} waited {} in {self} for {whom}", text(timeout))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Computing,
    Waiting,
    Finished,
    Panicked,
}

/// A rank's line on the board.
#[derive(Clone, Debug)]
pub struct Activity {
    state: State,
    last: Option<Call>,
}

impl Activity {
    pub fn new() -> Self {
        Activity {
            state: State::Computing,
            last: None,
        }
    }

    /// Has posted `call` and goes on.
    pub fn started(&mut self, call: &Call) {
        *self = Activity {
            state: State::Computing,
            last: Some(call.clone()),
        };
    }

    pub fn waiting(&mut self, call: &Call) {
        *self = Activity {
            state: State::Waiting,
            last: Some(call.clone()),
        };
    }

    pub fn computing(&mut self) {
        self.state = State::Computing;
    }

    pub fn finished(&mut self) {
        self.state = State::Finished;
    }

    pub fn panicked(&mut self) {
        self.state = State::Panicked;
    }

    /// Whether the rank's code has ended, so that it will post nothing any more.
    pub fn has_left(&self) -> bool {
        matches!(self.state, State::Finished | State::Panicked)
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.state, &self.last) {
            (State::Waiting, Some(call)) => write!(f, "waiting in {call}"),
            (State::Computing | State::Waiting, None) => write!(f, "computing, no collective called yet"),
            (State::Computing, Some(call)) => write!(f, "computing since its last collective, {call}"),
            (State::Finished, None) => write!(f, "finished, no collective called"),
            (State::Finished, Some(call)) => write!(f, "finished, its last collective was {call}"),
            (State::Panicked, None) => write!(f, "panicked before its first collective"),
            (State::Panicked, Some(call)) => write!(f, "panicked, its last collective was {call}"),
        }
    }
}
