//! A group of ranks and its rounds.

use super::joint::Joint;
use super::world::{World, lock};
use crate::buffer::dtype_name;
use crate::{Buffer, Collective, CommError, Site, Transfer};
use burn_std::DType;
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
    pub posts: Vec<Option<Post>>,
    /// By rank, its tensors; `None` before it has posted, and again when no one needs them any more.
    pub tensors: Vec<Option<Tensors>>,
    /// How many ranks need nothing more from the round.
    collected: usize,
    /// The making of a result that all ranks share.
    pub joint: Arc<OnceLock<Joint>>,
}

/// What a rank called, for comparison and for reports.
pub(super) struct Post {
    site: Site,
    transfers: Vec<Posted>,
}

/// A transfer without its elements.
struct Posted {
    op: Collective,
    shape: Vec<usize>,
    dtype: DType,
    on_device: bool,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("axis", &self.axis)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
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
    pub fn post(
        &self,
        world: &World,
        rank: usize,
        sequence: u64,
        site: Site,
        transfers: Vec<Transfer>,
    ) -> Result<(), CommError> {
        let size = self.ranks.len();
        let mut rounds = lock(&self.rounds);
        let round = rounds.entry(sequence).or_insert_with(|| Round {
            posts: (0..size).map(|_| None).collect(),
            tensors: vec![None; size],
            collected: 0,
            joint: Arc::default(),
        });
        let describe = |transfer: &Transfer| Posted {
            op: transfer.op.clone(),
            shape: transfer.buffer.shape().to_vec(),
            dtype: transfer.buffer.dtype(),
            on_device: transfer.buffer.host().is_none(),
        };
        let post = Post {
            site,
            transfers: transfers.iter().map(describe).collect(),
        };
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

impl Post {
    /// What makes it impossible for the two to be one collective.
    fn difference(&self, other: &Post) -> Option<&'static str> {
        let (own, others) = (&self.transfers, &other.transfers);
        if own[0].op.name() != others[0].op.name() {
            return Some("operation");
        }
        if own.len() != others.len() {
            return Some("number of tensors");
        }
        own.iter().zip(others).find_map(|(own, other)| {
            let (op, shape, other_shape) = (&own.op, &own.shape, &other.shape);
            let (any_shape, any_dtype) = match op {
                Collective::Shift { .. } => (true, false),
                Collective::Broadcast { .. } | Collective::Barrier => (true, true),
                _ => (false, false),
            };
            let alike = |(dim, (a, b)): (usize, (&usize, &usize))| a == b || op.varying_dim() == Some(dim);
            if !any_dtype && own.dtype != other.dtype {
                Some("dtype")
            } else if !any_dtype && own.on_device != other.on_device {
                Some("memory")
            } else if *op != other.op {
                Some("parameters")
            } else if any_shape
                || shape.len() == other_shape.len() && shape.iter().zip(other_shape).enumerate().all(alike)
            {
                None
            } else {
                Some("shape")
            }
        })
    }

    /// `all_gather over ulysses [2, 3, f32] at src/a.rs:1:2`
    fn describe(&self, axis: &str, difference: &str) -> String {
        let op = &self.transfers[0].op;
        let mut text = op.name().to_string();
        if difference == "parameters" {
            let parameters: Vec<_> = self.transfers.iter().map(|posted| posted.op.parameters()).collect();
            text += &format!(" {}", parameters.join(", "));
        }
        text += &format!(" over {axis}");
        for posted in self.transfers.iter().filter(|_| *op != Collective::Barrier) {
            let lengths: String = posted.shape.iter().map(|length| format!("{length}, ")).collect();
            text += &format!(" [{lengths}{}]", dtype_name(posted.dtype));
        }
        if difference == "memory" {
            text += if self.transfers[0].on_device {
                " on a device"
            } else {
                " in host memory"
            };
        }
        text + &format!(" at {}", self.site)
    }
}
