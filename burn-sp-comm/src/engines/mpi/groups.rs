//! How the members of a new group come to a channel of their own: the first of them chooses it, and tells the others.

use super::area::Area;
use super::library::{Fault, Library};
use super::progress::{Engine, Message};
use super::tags::{FOUND, fits};
use super::world::Group;
use crate::CommError;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// The longest message on a new group: enough for some thousands of members.
const MOST: usize = 16 << 10;

/// The first member of a group says this to the others.
#[derive(Serialize, Deserialize)]
struct Founding {
    id: u64,
    ranks: Vec<usize>,
    axis: String,
    channel: usize,
}

/// What is known of groups that not all members know of.
pub struct Groups {
    /// Groups that wait for a channel, and channels that wait for their group, by the group's number.
    asked: HashMap<u64, Arc<Group>>,
    told: HashMap<u64, Founding>,
    /// Where the next message comes in.
    inbox: Box<[u8]>,
    /// Messages on their way out, and how many are not over.
    outbox: Vec<Vec<u8>>,
    under_way: usize,
    /// How many channels this rank has chosen.
    chosen: usize,
}

impl Groups {
    pub fn new() -> Self {
        Groups {
            asked: HashMap::new(),
            told: HashMap::new(),
            inbox: vec![0; MOST].into(),
            outbox: Vec::new(),
            under_way: 0,
            chosen: 0,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.under_way == 0
    }

    /// A channel that no other group of its members has. Channel 0 is that of the world.
    fn choose(&mut self, library: &Library) -> Result<usize, Fault> {
        self.chosen += 1;
        let channel = self.chosen * library.size + library.rank;
        match fits(channel, library.tags) {
            true => Ok(channel),
            false => Err(Fault::other(format!(
                "this MPI library has tags up to {}, which is not enough for another group; keep groups instead of \
                 making them anew",
                library.tags
            ))),
        }
    }
}

impl Engine {
    /// Makes ready for the next message on a new group.
    pub fn expect_founding(&mut self) -> Result<(), Fault> {
        let area = Area::dense(self.groups.inbox.as_mut_ptr(), MOST);
        // SAFETY: the memory lives as long as the engine, and is looked at only when a message is over.
        let request = unsafe { self.library.receive(&[area], None, FOUND) }?;
        self.requests.push(request, Message::Founding);
        Ok(())
    }

    /// This rank is in a new group.
    pub fn found(&mut self, group: Arc<Group>) -> Result<(), Fault> {
        let rank = self.library.rank;
        if group.ranks.iter().min() != Some(&rank) {
            return match self.groups.told.remove(&group.id) {
                Some(founding) => self.settle(&group, &founding),
                None => {
                    self.groups.asked.insert(group.id, group);
                    Ok(())
                }
            };
        }
        let channel = self.groups.choose(&self.library)?;
        group.extra.get_or_init(|| channel);
        let founding = Founding {
            id: group.id,
            ranks: group.ranks.clone(),
            axis: group.axis.to_string(),
            channel,
        };
        let bytes = postcard::to_stdvec(&founding).map_err(|error| Fault::other(error.to_string()))?;
        for other in group.ranks.iter().filter(|other| **other != rank) {
            let mut message = bytes.clone();
            let area = Area::dense(message.as_mut_ptr(), message.len());
            // SAFETY: the outbox keeps the message until all of them are over.
            let request = unsafe { self.library.send(&[area], *other, FOUND) }?;
            self.groups.outbox.push(message);
            self.groups.under_way += 1;
            self.requests.push(request, Message::Founded);
        }
        self.resume()
    }

    /// A message on a new group has come.
    pub fn founding_came(&mut self) -> Result<(), Fault> {
        let founding = postcard::from_bytes::<Founding>(&self.groups.inbox);
        self.expect_founding()?;
        let founding = founding.map_err(|error| Fault::other(error.to_string()))?;
        match self.groups.asked.remove(&founding.id) {
            Some(group) => self.settle(&group, &founding),
            None => {
                self.groups.told.insert(founding.id, founding);
                Ok(())
            }
        }
    }

    /// A message on a new group is over.
    pub fn founding_went(&mut self) {
        self.groups.under_way -= 1;
        if self.groups.under_way == 0 {
            self.groups.outbox.clear();
        }
    }

    /// Compares what this rank and the group's first member made of the group.
    fn settle(&mut self, group: &Arc<Group>, founding: &Founding) -> Result<(), Fault> {
        if group.ranks != founding.ranks || *group.axis != *founding.axis {
            let first = founding.ranks.iter().min().copied().unwrap_or_default();
            let report = format!(
                "rank {first}: subgroup {:?} over {}; rank {}: subgroup {:?} over {}",
                founding.ranks, founding.axis, self.library.rank, group.ranks, group.axis
            );
            self.fail(CommError::Mismatch {
                difference: "subgroup".into(),
                report,
            });
            return Ok(());
        }
        group.extra.get_or_init(|| founding.channel);
        self.resume()
    }
}
