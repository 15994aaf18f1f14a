use std::{fmt, ops::Range};

use burn_sp_comm::Parts;

/// The rule by which an axis splits a dimension among its ranks. Lengths need not divide.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Split {
    /// One range a rank; the first `len % ranks` ranks own one more: 7 on 4 ranks are 2, 2, 2, 1.
    #[default]
    Contiguous,
    /// `2 * ranks` chunks by the same rule, of which rank `r` owns number `r` and number `2 * ranks - 1 - r`. Under a
    /// causal mask every rank then has the same work.
    Zigzag,
    /// Any ranges; they must cover the dimension exactly once.
    Explicit(Parts),
}

impl Split {
    /// The ranges of every rank.
    ///
    /// # Panics
    /// If explicit parts are not for `ranks` ranks or do not cover `0..len` exactly once.
    pub fn parts(&self, len: usize, ranks: usize) -> Parts {
        match self {
            Split::Contiguous => Parts::contiguous(len, ranks),
            Split::Zigzag => {
                let chunks = Parts::contiguous(len, 2 * ranks);
                Parts::new(
                    (0..ranks)
                        .map(|rank| join(chunks.of(rank), chunks.of(2 * ranks - 1 - rank)))
                        .collect(),
                )
            }
            Split::Explicit(parts) => {
                assert!(
                    parts.ranks() == ranks,
                    "split: explicit parts are for {} ranks, the axis has {ranks}",
                    parts.ranks()
                );
                let mut ranges: Vec<_> = (0..ranks).flat_map(|rank| parts.of(rank).iter().cloned()).collect();
                ranges.retain(|range| !range.is_empty());
                ranges.sort_by_key(|range| range.start);
                let mut next = 0;
                for range in &ranges {
                    assert!(
                        range.start == next,
                        "split: explicit parts own position {} {}",
                        next.min(range.start),
                        if range.start < next { "twice" } else { "nowhere" }
                    );
                    next = range.end;
                }
                assert!(
                    next == len,
                    "split: explicit parts cover {next} positions, the dimension has {len}"
                );
                parts.clone()
            }
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Split::Contiguous => "contiguous",
            Split::Zigzag => "zigzag",
            Split::Explicit(_) => "explicit",
        })
    }
}

/// Two ascending runs of ranges as few non-empty ranges as possible.
fn join(low: &[Range<usize>], high: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in low.iter().chain(high).filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range.clone()),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_lengths_give_the_first_ranks_one_more() {
        let parts = Split::Contiguous.parts(7, 4);
        assert_eq!((0..4).map(|rank| parts.len_of(rank)).collect::<Vec<_>>(), [2, 2, 2, 1]);
    }

    #[test]
    fn zigzag_pairs_the_first_chunk_with_the_last() {
        let parts = Split::Zigzag.parts(8, 2);
        assert_eq!(parts.of(0), [0..2, 6..8]);
        assert_eq!(parts.of(1), [2..6]);
    }

    #[test]
    fn every_rule_covers_every_position_once() {
        for split in [Split::Contiguous, Split::Zigzag] {
            for ranks in 1..=8 {
                for len in 0..=40 {
                    let parts = split.parts(len, ranks);
                    let mut owned: Vec<usize> = (0..ranks)
                        .flat_map(|rank| parts.of(rank).iter().cloned().flatten().collect::<Vec<_>>())
                        .collect();
                    owned.sort();
                    assert_eq!(owned, (0..len).collect::<Vec<_>>(), "{split} of {len} over {ranks}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "own position 2 nowhere")]
    fn explicit_parts_with_a_hole_are_refused() {
        Split::Explicit(Parts::new(vec![vec![0..2], vec![3..4]])).parts(4, 2);
    }

    #[test]
    #[should_panic(expected = "own position 1 twice")]
    fn explicit_parts_that_overlap_are_refused() {
        Split::Explicit(Parts::new(vec![vec![0..2], vec![1..4]])).parts(4, 2);
    }
}
