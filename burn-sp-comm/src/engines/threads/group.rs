//! A group of ranks and its rounds.

use super::joint::Joint;
use super::world::World;
use crate::engines::shared::activity::Call;
use crate::engines::shared::fingerprint::Fingerprint;
use crate::engines::shared::lock;
use crate::engines::shared::seat::{Members, World as _};
use crate::{Buffer, CommError, Transfer};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

/// The tensors that one rank has posted, by transfer.
pub(super) type Tensors = Arc<Vec<Buffer>>;

/// What the members of a group share.
pub(super) struct Group {
    /// Unique in the process; tells apart groups with the same members.
    pub id: u64,
    pub ranks: Vec<usize>,
    pub axis: Arc<str>,
    pub rounds: Mutex<BTreeMap<u64, Round>>,
    pub signal: Condvar,
}

/// One collective of a group.
pub(super) struct Round {
    /// By rank within the group, what it called; `None` until it has.
    pub posts: Vec<Option<Fingerprint>>,
    /// By rank, its tensors; `None` before it has posted, and again when no one needs them any more.
    pub tensors: Vec<Option<Tensors>>,
    /// How many ranks need nothing more from the round.
    collected: usize,
    /// The making of a result that all ranks share.
    pub joint: Arc<OnceLock<Joint>>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("axis", &self.axis)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

impl Members for Group {
    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn axis(&self) -> &Arc<str> {
        &self.axis
    }
}

impl Group {
    pub fn new(ranks: Vec<usize>, axis: Arc<str>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Group {
            id,
            ranks,
            axis,
            rounds: Mutex::default(),
            signal: Condvar::new(),
        }
    }

    /// Makes every waiting rank look again.
    pub fn wake(&self) {
        // With the lock, no waiter can be between looking and falling asleep.
        drop(lock(&self.rounds));
        self.signal.notify_all();
    }

    /// Puts a rank's tensors into the round. On disagreement returns what differs and who called what.
    pub fn post(&self, world: &World, rank: usize, call: &Call, transfers: Vec<Transfer>) -> Result<(), CommError> {
        let size = self.ranks.len();
        let mut rounds = lock(&self.rounds);
        let round = rounds.entry(call.sequence).or_insert_with(|| Round {
            posts: (0..size).map(|_| None).collect(),
            tensors: vec![None; size],
            collected: 0,
            joint: Arc::default(),
        });
        let post = Fingerprint::new(call.site.clone(), &transfers);
        let handed_over = transfers
            .iter()
            .any(|transfer| transfer.op.sender(rank, size).is_some());
        // All earlier ones agree with each other, so one comparison is enough.
        let difference = round
            .posts
            .iter()
            .flatten()
            .next()
            .and_then(|other| other.difference(&post));
        if let Some(difference) = difference {
            let called = |member: usize| {
                let own = (member == rank).then_some(&post);
                match own.or(round.posts[member].as_ref()) {
                    Some(post) => format!("rank {}: {}", self.ranks[member], post.describe(&self.axis, difference)),
                    None => {
                        let activity = world.activity(self.ranks[member]).to_string();
                        format!("rank {}: not there yet ({activity})", self.ranks[member])
                    }
                }
            };
            let report = (0..size).map(called).collect::<Vec<_>>().join("; ");
            // Nothing of it enters the round: whoever waits must not take it for complete before the world has failed.
            return Err(CommError::Mismatch {
                difference: difference.into(),
                report,
            });
        }
        round.posts[rank] = Some(post);
        round.tensors[rank] = Some(Arc::new(
            transfers.into_iter().map(|transfer| transfer.buffer).collect(),
        ));
        let complete = round.posts.iter().all(Option::is_some);
        drop(rounds);
        if complete || handed_over {
            self.signal.notify_all();
        }
        Ok(())
    }

    /// Notes that a rank needs nothing more from the round; the last one takes it away.
    pub fn leave_round(&self, sequence: u64) {
        let mut rounds = lock(&self.rounds);
        let Some(round) = rounds.get_mut(&sequence) else { return };
        round.collected += 1;
        if round.collected == self.ranks.len() {
            let round = rounds.remove(&sequence);
            // Freeing large tensors takes a while; others may have the lock meanwhile.
            drop(rounds);
            drop(round);
        }
    }
}
