//! A hash that is the same on every machine and in every release: what is saved today is compared tomorrow.

/// FNV-1a of 64 bits (Fowler, Noll and Vo; RFC 9923). It tells apart what differs by accident, not by malice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fnv(u64);

impl Fnv {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// Of all before and these bytes.
    pub fn bytes(self, bytes: &[u8]) -> Self {
        let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        Self(bytes.iter().fold(self.0, add))
    }

    /// Of all before and these bytes, and where they end.
    pub fn field(self, bytes: &[u8]) -> Self {
        self.number(bytes.len() as u64).bytes(bytes)
    }

    /// Of all before and a number.
    pub fn number(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    pub fn value(self) -> u64 {
        self.0
    }

    pub fn hex(self) -> String {
        format!("{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_hashes() {
        let hash = |bytes: &[u8]| Fnv::new().bytes(bytes).value();
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(Fnv::new().bytes(b"foo").bytes(b"bar").hex(), "85944171f73967e8");
        // A field ends somewhere.
        let pair = |one: &[u8], other: &[u8]| Fnv::new().field(one).field(other);
        assert_ne!(pair(b"ab", b"c"), pair(b"a", b"bc"));
    }
}
