//! The first message of a call: its fingerprint. Most fit in one message of fixed length, for which a receive can wait;
//! the rest of a longer one follows.

use crate::engines::shared::fingerprint::Fingerprint;

/// Small enough to be sent at once by every transport.
pub const FIRST: usize = 1024;

const LENGTH: usize = 4;

/// The messages of a fingerprint: one of [`FIRST`] bytes, and the rest, if there is one.
pub type Encoded = (Box<[u8]>, Box<[u8]>);

/// The messages of a fingerprint.
pub fn encode(fingerprint: &Fingerprint) -> Result<Encoded, String> {
    let bytes = postcard::to_stdvec(fingerprint).map_err(|error| error.to_string())?;
    let mut first = vec![0; FIRST];
    first[..LENGTH].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    let fits = bytes.len().min(FIRST - LENGTH);
    first[LENGTH..LENGTH + fits].copy_from_slice(&bytes[..fits]);
    Ok((first.into(), bytes[fits..].into()))
}

/// How long the rest is of which this is the first message.
pub fn rest(first: &[u8]) -> usize {
    let length = u32::from_le_bytes([first[0], first[1], first[2], first[3]]) as usize;
    length.saturating_sub(FIRST - LENGTH)
}

/// The fingerprint of both messages.
pub fn decode(first: &[u8], rest: &[u8]) -> Result<Fingerprint, String> {
    let bytes = [&first[LENGTH..], rest].concat();
    postcard::from_bytes(&bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, Collective, Parts, Site, Transfer};

    #[test]
    fn short_and_long_ones_arrive() {
        for ranks in [1, 4, 50, 400] {
            let parts = Parts::contiguous(3 * ranks, ranks);
            let transfer = Transfer {
                op: Collective::AllGather { dim: 0, parts },
                buffer: Buffer::from_slice(&[1f32; 3], [3]),
            };
            let sent = Fingerprint::new(Site::here().backward().into(), &[transfer.clone(), transfer]);
            let (first, more) = encode(&sent).unwrap();
            assert_eq!((first.len(), rest(&first)), (FIRST, more.len()));
            assert_eq!(more.is_empty(), ranks < 100, "{ranks} ranks: {}", more.len());
            let received = decode(&first, &more).unwrap();
            assert_eq!(received, sent);
            assert_eq!(received.difference(&sent), None);
        }
    }
}
