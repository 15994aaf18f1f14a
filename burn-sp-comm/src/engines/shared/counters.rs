//! The traffic of one rank.

use crate::Counter;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// By operation and axis.
#[derive(Debug, Default)]
pub struct Counters(BTreeMap<(&'static str, Arc<str>), Tally>);

#[derive(Debug, Default)]
struct Tally {
    calls: u64,
    bytes: u64,
    time: Duration,
}

impl Counters {
    pub fn add(&mut self, op: &'static str, axis: &Arc<str>, calls: u64, bytes: usize, time: Duration) {
        let tally = self.0.entry((op, axis.clone())).or_default();
        tally.calls += calls;
        tally.bytes += bytes as u64;
        tally.time += time;
    }

    /// As they are reported for a global rank.
    pub fn report(&self, rank: usize) -> Vec<Counter> {
        let counter = |((op, axis), tally): (&(&'static str, Arc<str>), &Tally)| Counter {
            rank,
            op: op.to_string(),
            axis: axis.to_string(),
            calls: tally.calls,
            bytes_sent: tally.bytes,
            seconds: tally.time.as_secs_f64(),
        };
        self.0.iter().map(counter).collect()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}
