//! What goes over the lines between ranks and the hub: frames of a length and a message.

use crate::CommError;
use crate::engines::shared::fingerprint::Fingerprint;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};
use std::time::Duration;

/// How long the hub waits for a rank to accept a message, or to say who it is.
pub const STUCK: Duration = Duration::from_secs(2);

/// How often each side of a line says that it lives.
pub const PULSE: Duration = Duration::from_secs(5);

/// How long a side may be silent, for ranks with this timeout, before its host or the network counts as gone.
pub fn silence(timeout: Duration) -> Duration {
    timeout.clamp(Duration::from_secs(60), Duration::from_secs(3600))
}

/// Longer frames are none of ours.
const MOST: usize = 64 << 20;

/// How many collectives a rank has called, by the number of the group.
pub type Called = Vec<(u64, u64)>;

/// From a rank to the hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToHub {
    /// The first frame. The cookie tells ranks of this run from strangers.
    Hello { cookie: u64, rank: usize },
    /// The rank's process lives; sent now and then.
    Alive,
    /// The rank gives up.
    Failed(CommError),
    /// The rank waits in vain, `waiting` says where and for whom: for too long, or because the code of one of them has
    /// ended.
    Late { waiting: String, left: Option<usize> },
    /// The answer to [`ToRank::WhatAreYouDoing`].
    Doing(String),
    /// What the rank called, for comparison; see [`Compared`].
    Called(Compared),
    /// To be handed on to these ranks; `about` tells a rank's letters apart.
    Letter { to: Vec<usize>, about: u64, bytes: Vec<u8> },
    /// The rank's code has ended well, after so many collectives.
    Finished { called: Called, doing: String },
    /// The rank's code has ended after a failure, so its process may end.
    Ended,
}

/// From the hub to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToRank {
    /// The answer to [`ToHub::Hello`]: the rank has found its hub.
    Admitted,
    /// All ranks are there.
    Welcome,
    /// The hub lives; sent now and then.
    Alive,
    /// Everyone is asked, to report on someone who is late or has died.
    WhatAreYouDoing,
    /// The world has failed.
    Failed(CommError),
    /// A rank called this; sent to the members of the group that may need to know its tensors' shapes.
    Called { rank: usize, called: Compared },
    /// What a rank wrote to this one.
    Letter { from: usize, about: u64, bytes: Vec<u8> },
    /// The code of a rank has ended well.
    Finished { rank: usize, called: Called },
    /// No rank has anything left to do or to say.
    AllEnded,
}

/// A call that the hub compares with those of the group's other members.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// The number of the group, the same on all its members.
    pub group: u64,
    /// Global ranks, by rank within the group.
    pub members: Vec<usize>,
    pub axis: String,
    /// The number of the call within the group.
    pub sequence: u64,
    pub fingerprint: Fingerprint,
}

/// Sends a message.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    if bytes.len() > MOST {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a message that is too long",
        ));
    }
    let mut frame = Vec::with_capacity(4 + bytes.len());
    frame.extend((bytes.len() as u32).to_le_bytes());
    frame.extend(bytes);
    // In one go, or the two halves would make two packets.
    to.write_all(&frame)
}

/// Receives a message; the error kind is `UnexpectedEof` where the other side has gone.
pub fn receive<M: DeserializeOwned>(from: &mut impl Read) -> io::Result<M> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MOST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame of a stranger"));
    }
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
