//! What engines have in common: a rank's seat in a group with all its checks, what collectives are compared by, what
//! ranks were last doing, and the traffic counters. An engine adds how tensors travel.

pub mod activity;
pub mod counters;
pub mod fingerprint;
pub mod panics;
pub mod seat;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Locks also what a panicking thread has left locked: all our updates are single steps, so nothing is ever half done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// So long from now. What is beyond the clock's reach is as good as a year.
pub fn deadline(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Instant::now() + timeout.min(YEAR)
}

/// `rank 1, rank 3`
pub fn names(ranks: impl IntoIterator<Item = usize>) -> String {
    let names: Vec<_> = ranks.into_iter().map(|rank| format!("rank {rank}")).collect();
    names.join(", ")
}

/// `200 ms`, `60 s`
pub fn text(duration: Duration) -> String {
    if duration < Duration::from_secs(10) {
        format!("{} ms", duration.as_millis())
    } else {
        format!("{:.0} s", duration.as_secs_f64())
    }
}
