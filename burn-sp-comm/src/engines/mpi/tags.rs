//! Tags, by which MPI tells messages between two ranks apart. Messages with one tag arrive in the order in which they were
//! sent.

/// The tag of messages on new groups; those of channels come after it.
pub const FOUND: usize = 0;

/// The kinds of messages, which share a group's channel.
#[derive(Clone, Copy)]
pub enum Kind {
    Header,
    HeaderRest,
    First,
    Second,
}

const KINDS: usize = 4;

/// Calls of a group that can be under way at once without their messages being taken for one another's.
const WINDOW: usize = 16;

/// The tag of a message of a group's call.
pub fn tag(channel: usize, sequence: u64, kind: Kind) -> usize {
    FOUND + 1 + (channel * WINDOW + sequence as usize % WINDOW) * KINDS + kind as usize
}

/// Whether a call of a group must wait until an earlier one is over.
pub fn is_too_far(sequence: u64, earlier: u64) -> bool {
    sequence >= earlier + WINDOW as u64
}

/// Whether all tags of a channel are among those that the library has.
pub fn fits(channel: usize, most: usize) -> bool {
    tag(channel, WINDOW as u64 - 1, Kind::Second) <= most
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_messages_share_a_tag() {
        let kinds = [Kind::Header, Kind::HeaderRest, Kind::First, Kind::Second];
        let mut tags = HashSet::from([FOUND]);
        for channel in 0..5 {
            for sequence in 0..WINDOW as u64 {
                kinds
                    .iter()
                    .for_each(|kind| assert!(tags.insert(tag(channel, sequence, *kind))));
            }
        }
        // What MPI promises is enough for some hundred groups.
        assert!(fits(500, 32_767) && !fits(512, 32_767));
    }
}
