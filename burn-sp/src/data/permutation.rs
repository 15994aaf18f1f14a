use kernels_cubecl::philox::Philox;

/// Four rounds of good functions look random (Luby and Rackoff, "How to Construct Pseudorandom Permutations from
/// Pseudorandom Functions", 1988) where numbers are large; few numbers need more.
const ROUNDS: u64 = 8;

/// An order of `0..len` that looks random and needs no memory: each place is computed by itself.
///
/// A Feistel network over the least power of 4 that holds `len`, with [`Philox`] as its round function, is a permutation
/// of that; what falls beyond `len` is permuted again until it does not ("cycle walking": Black and Rogaway, "Ciphers with
/// Arbitrary Finite Domains", 2002).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    /// Bits of each half of a number.
    half: u32,
    words: Philox,
}

impl Permutation {
    /// The order of `0..len` that seed and stream name.
    pub fn new(len: u64, seed: u64, stream: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Self {
            len,
            half: bits.div_ceil(2).max(1),
            words: Philox::new(seed, stream),
        }
    }

    /// What comes at a place.
    ///
    /// # Panics
    /// If the place is not below `len`.
    pub fn at(&self, place: u64) -> u64 {
        assert!(place < self.len, "permutation: place {place} of {}", self.len);
        let mut number = self.mix(place);
        while number >= self.len {
            number = self.mix(number);
        }
        number
    }

    fn mix(&self, number: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let (mut left, mut right) = (number >> self.half, number & mask);
        for round in 0..ROUNDS {
            // The half has at most 32 bits, so no two rounds share a word.
            let word = u64::from(self.words.word(round << 32 | right));
            (left, right) = (right, left ^ (word & mask));
        }
        left << self.half | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once() {
        for len in (1..70).chain([255, 256, 257, 4095, 4096, 5000]) {
            let order = Permutation::new(len, 3, len);
            let mut numbers: Vec<u64> = (0..len).map(|place| order.at(place)).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..len), "{len}");
        }
    }

    /// 64-bit lengths take no table, and the ends of the range are reached without overflow.
    #[test]
    fn the_largest_lengths_are_ordered_too() {
        for len in [u64::MAX, 1 << 63, (1 << 62) + 1, 1 << 33] {
            let order = Permutation::new(len, 1, 2);
            let numbers: Vec<u64> = [0, 1, len / 2, len - 1].map(|place| order.at(place)).into();
            assert!(numbers.iter().all(|number| *number < len));
            assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]));
        }
    }

    /// Over many seeds each number comes first, and last, about equally often.
    #[test]
    fn places_are_even() {
        for len in [2, 3, 5, 16, 21] {
            let (draws, mut first, mut last) = (4000, vec![0i64; len], vec![0i64; len]);
            for seed in 0..draws {
                let order = Permutation::new(len as u64, seed, 9);
                first[order.at(0) as usize] += 1;
                last[order.at(len as u64 - 1) as usize] += 1;
            }
            let mean = draws as f64 / len as f64;
            let bound = 5.0 * (mean * (1.0 - 1.0 / len as f64)).sqrt();
            for count in first.iter().chain(&last) {
                assert!((*count as f64 - mean).abs() < bound, "{len}: {first:?}, {last:?}");
            }
        }
    }

    #[test]
    fn seed_and_stream_name_the_order() {
        let order = |seed, stream| {
            (0..50)
                .map(|place| Permutation::new(50, seed, stream).at(place))
                .collect::<Vec<_>>()
        };
        assert_eq!(order(1, 2), order(1, 2));
        assert_ne!(order(1, 2), order(2, 2));
        assert_ne!(order(1, 2), order(1, 3));
    }
}
