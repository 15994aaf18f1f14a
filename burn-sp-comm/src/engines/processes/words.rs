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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::processes::Hub;
    use crate::{Buffer, Collective, Site, Transfer};
    use std::sync::Arc;
    use std::time::Duration;

    const TIMEOUT: Duration = Duration::from_secs(20);

    /// Runs `body` on three ranks; all end well.
    fn ranks(body: impl Fn(&Control) + Sync) {
        let (hub, address) = Hub::start(3, TIMEOUT).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (body, address) = (&body, &address);
                scope.spawn(move || {
                    let control = Control::join(rank, 3, TIMEOUT, address).unwrap();
                    body(&control);
                    control.announce_end(vec![(7, 1)]);
                    match control.failure() {
                        None => control.await_all().unwrap(),
                        Some(_) => control.give_up(),
                    }
                });
            }
        });
        hub.join();
    }

    /// The first call of group 7, whose members are ranks 2, 0 and 1.
    fn call(op: Collective, length: usize) -> Compared {
        let buffer = Buffer::from_slice(&vec![0f32; length], [length]);
        Compared {
            group: 7,
            members: vec![2, 0, 1],
            axis: "ring".into(),
            sequence: 0,
            fingerprint: Fingerprint::new(Site::here().into(), &[Transfer { op, buffer }]),
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(300)
    }

    #[test]
    fn letters_reach_whom_they_are_for() {
        ranks(|control| match control.rank() {
            0 => control.write(vec![1, 2], 5, vec![1, 2, 3]),
            1 => {
                control.write(vec![2], 5, vec![9]);
                let read = control.read(0, 5, Instant::now() + TIMEOUT, || unreachable!());
                assert_eq!(read, Ok(vec![1, 2, 3]));
            }
            _ => {
                // In any order; each once.
                let until = Instant::now() + TIMEOUT;
                assert_eq!(control.read(1, 5, until, || unreachable!()), Ok(vec![9]));
                assert_eq!(control.read(0, 5, until, || unreachable!()), Ok(vec![1, 2, 3]));
            }
        });
    }

    #[test]
    fn a_letter_that_never_comes_is_a_timeout() {
        ranks(|control| {
            let error = control
                .read((control.rank() + 1) % 3, 1, soon(), || "rank x waited".into())
                .unwrap_err();
            let CommError::Timeout { report } = &error else {
                panic!("{error}")
            };
            assert!(report.starts_with("rank x waited. rank 0: "), "{report}");
        });
    }

    #[test]
    fn receivers_learn_the_shape_of_what_is_handed_over() {
        ranks(|control| {
            control.called(call(Collective::Shift { by: 1 }, control.rank() + 1));
            // The group's order is 2, 0, 1.
            let sender = [2, 0, 1][control.rank()];
            let called = control
                .called_by(7, 0, sender, Instant::now() + TIMEOUT, || unreachable!())
                .unwrap();
            assert_eq!(called.tensors[0].shape, [sender + 1]);
        });
    }

    #[test]
    fn a_barrier_learns_of_everyone_and_an_all_reduce_of_no_one() {
        ranks(|control| {
            control.called(call(Collective::Barrier, 0));
            for other in (0..3).filter(|other| *other != control.rank()) {
                control
                    .called_by(7, 0, other, Instant::now() + TIMEOUT, || unreachable!())
                    .unwrap();
            }
        });
        ranks(|control| {
            control.called(call(Collective::AllReduce, 1));
            let other = (control.rank() + 1) % 3;
            let error = control
                .called_by(7, 0, other, soon(), || "rank x waited".into())
                .unwrap_err();
            assert!(matches!(error, CommError::Timeout { .. }), "{error}");
        });
    }

    #[test]
    fn who_waits_for_a_rank_that_has_left_is_told_so() {
        let (hub, address) = Hub::start(2, TIMEOUT).unwrap();
        let join = |rank: usize| {
            let address = address.clone();
            std::thread::spawn(move || Control::join(rank, 2, TIMEOUT, &address).unwrap())
        };
        let controls: Vec<Arc<Control>> = [join(0), join(1)].map(|joined| joined.join().unwrap()).into();
        // It has called one collective of the group, number 0, and will call no other.
        controls[1].announce_end(vec![(7, 1)]);
        let until = Instant::now() + TIMEOUT;
        let error = controls[0]
            .called_by(7, 1, 1, until, || "rank 0 waits".into())
            .unwrap_err();
        assert!(matches!(error, CommError::Departed { rank: 1, .. }), "{error}");
        controls.iter().for_each(|control| control.give_up());
        hub.join();
    }

    #[test]
    fn other_calls_are_a_mismatch_on_every_rank() {
        ranks(|control| {
            let by = if control.rank() == 1 { 2 } else { 1 };
            control.called(call(Collective::Shift { by }, 1));
            let sender = [2, 0, 1][control.rank()];
            let until = Instant::now() + TIMEOUT;
            // The failure may come before the call, or with the next look.
            let _ = control.called_by(7, 0, sender, until, || unreachable!());
            while control.failure().is_none() {
                assert!(Instant::now() < until);
                std::thread::sleep(Duration::from_millis(2));
            }
            let error = control.failure().unwrap();
            let CommError::Mismatch { difference, report } = &error else {
                panic!("{error}")
            };
            assert_eq!(difference, "parameters");
            assert!(
                report.contains("rank 1: shift (by 2) over ring [1, f32] at"),
                "{report}"
            );
        });
    }
}
