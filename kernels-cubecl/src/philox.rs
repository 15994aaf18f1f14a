//! Philox 4x32-10, the counter-based random generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
//! (2011).
//!
//! Word `i` of a stream is a pure function of seed, stream and `i`: whoever needs it computes it, on any device, in any
//! order, without state.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Blocks computed side by side by [`Philox::fill`].
const LANES: usize = 16;

/// The four words of one counter value: the bare function, for known-answer tests and other uses of the counter.
///
/// ```
/// use kernels_cubecl::philox::block;
/// // A known answer of the authors' own code, Random123.
/// assert_eq!(block([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
pub fn block(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    rounds(counter.map(u64::from), key).map(|word| word as u32)
}

/// The words sit in the low halves of 64 bits, as vector multiplications want them; the high halves hold rubbish.
#[inline(always)]
fn rounds([mut c0, mut c1, mut c2, mut c3]: [u64; 4], mut key: [u32; 2]) -> [u64; 4] {
    const LOW: u64 = 0xFFFF_FFFF;
    for _ in 0..ROUNDS {
        let left = (c0 & LOW) * MULTIPLIERS[0];
        let right = (c2 & LOW) * MULTIPLIERS[1];
        (c0, c1) = ((right >> 32) ^ c1 ^ u64::from(key[0]), right);
        (c2, c3) = ((left >> 32) ^ c3 ^ u64::from(key[1]), left);
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    [c0, c1, c2, c3]
}

/// A stream of random words, indexed by 64-bit positions.
///
/// The key is the seed; the counter is (position / 4, stream), each 64 bits with the low half first, and
/// position % 4 picks one of the block's four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
    stream: [u32; 2],
}

impl Philox {
    /// The stream `stream` of the generator with this seed.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self {
            key: halves(seed),
            stream: halves(stream),
        }
    }

    /// The word at a position.
    pub fn word(&self, position: u64) -> u32 {
        self.block(position / 4)[(position % 4) as usize]
    }

    /// Writes the words at `start..start + out.len()`.
    #[inline(always)]
    pub fn fill(&self, start: u64, out: &mut [u32]) {
        let mut position = start;
        let mut out = out;
        while !out.is_empty() {
            let skip = (position % 4) as usize;
            let count;
            if out.len() < LANES {
                count = out.len().min(4 - skip);
                out[..count].copy_from_slice(&self.block(position / 4)[skip..skip + count]);
            } else {
                count = out.len().min(4 * LANES - skip);
                out[..count].copy_from_slice(&self.batch(position / 4)[skip..skip + count]);
            }
            position += count as u64;
            out = &mut out[count..];
        }
    }

    fn block(&self, index: u64) -> [u32; 4] {
        let [low, high] = halves(index);
        block([low, high, self.stream[0], self.stream[1]], self.key)
    }

    /// The words of `LANES` blocks from block `first` on.
    #[inline(always)]
    fn batch(&self, first: u64) -> [u32; 4 * LANES] {
        let [low, high] = self.stream.map(u64::from);
        let mut out = [0; 4 * LANES];
        // The rounds unroll, and the loop over blocks becomes vector instructions.
        for (lane, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let index = first.wrapping_add(lane as u64);
            let words = rounds([index, index >> 32, low, high], self.key);
            for word in 0..4 {
                out[word] = words[word] as u32;
            }
        }
        out
    }
}

/// Low and high half.
#[inline(always)]
pub(crate) fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(block(counter, key), expected);
        }
        // The same answer through a stream: counter and key halves are low first.
        let philox = Philox::new(0x299f_31d0_a409_3822, 0x0370_7344_1319_8a2e);
        assert_eq!(
            philox.word(4 * 0x05a3_08d3_243f_6a88 + 3),
            philox.block(0x05a3_08d3_243f_6a88)[3]
        );
        assert_eq!(
            philox.block(0x85a3_08d3_243f_6a88),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn fill_gives_the_words_at_their_positions() {
        let philox = Philox::new(7, 9);
        // Starts off a block border, and a run across the carry into the counter's high half.
        for start in [0, 1, 6, 63, (1 << 34) - 50] {
            for len in [0, 1, 3, 15, 16, 61, 64, 200] {
                let mut words = vec![0; len];
                philox.fill(start, &mut words);
                for (i, &word) in words.iter().enumerate() {
                    assert_eq!(
                        word,
                        philox.word(start + i as u64),
                        "start {start}, len {len}, word {i}"
                    );
                }
            }
        }
    }
}
