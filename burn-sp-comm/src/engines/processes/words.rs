//! What ranks learn of each other by way of the hub, beside the failures: what the others called, and letters.

use super::Control;
use super::control::News;
use super::wire::{Compared, ToHub};
use crate::CommError;
use crate::engines::shared::fingerprint::Fingerprint;
use std::time::Instant;

impl Control {
    /// Hands a call over to be compared with those of the group's other members. Does not wait.
    pub fn called(&self, call: Compared) {
        self.tell(&ToHub::Called(call));
    }

    /// What `rank` called there, once it has. For operations that hand tensors over, whose shapes may differ.
    ///
    /// # Errors
    /// The world's failure; that `rank` is late, or that its code has ended.
    pub fn called_by(
        &self,
        group: u64,
        sequence: u64,
        rank: usize,
        deadline: Instant,
        waiting: impl FnOnce() -> String,
    ) -> Result<Fingerprint, CommError> {
        let key = (group, sequence, rank);
        let look = |news: &mut News| match news.calls.remove(&key) {
            Some(fingerprint) => Some(Some(fingerprint)),
            None => news.has_left(rank, group, sequence).then_some(None),
        };
        match self.await_news(Some(deadline), look) {
            Some(Some(fingerprint)) => Ok(fingerprint),
            Some(None) => Err(self.departed(rank, waiting())),
            None => Err(self.failure().unwrap_or_else(|| self.late(waiting()))),
        }
    }

    /// Sends a few bytes to other ranks, by way of the hub. Does not wait.
    pub fn write(&self, to: Vec<usize>, about: u64, bytes: Vec<u8>) {
        self.tell(&ToHub::Letter { to, about, bytes });
    }

    /// What `from` has written to this rank about it.
    ///
    /// # Errors
    /// The world's failure; at the latest that `from` is late.
    pub fn read(
        &self,
        from: usize,
        about: u64,
        deadline: Instant,
        waiting: impl FnOnce() -> String,
    ) -> Result<Vec<u8>, CommError> {
        match self.await_news(Some(deadline), |news| news.letters.remove(&(from, about))) {
            Some(bytes) => Ok(bytes),
            None => Err(self.failure().unwrap_or_else(|| self.late(waiting()))),
        }
    }
}
