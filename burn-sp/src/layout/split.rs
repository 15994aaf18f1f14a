use std::{fmt, ops::Range};

use burn_sp_comm::Parts;
use kernels_cubecl::{Mask, Positions};

/// The rule by which an axis splits a dimension among its ranks. Lengths need not divide.
///
/// ```
/// use burn_sp::layout::Split;
///
/// // Who owns which of 7 positions on 2 ranks.
/// let owned = |split: Split| [0, 1].map(|rank| split.parts(7, 2).of(rank).to_vec());
/// assert_eq!(owned(Split::Contiguous), [vec![0..4], vec![4..7]]);
/// assert_eq!(owned(Split::Zigzag), [vec![0..2, 6..7], vec![2..6]]);
/// assert_eq!(owned(Split::Halves), [vec![0..2, 3..5], vec![2..3, 5..7]]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Split {
    /// One range a rank; the first `len % ranks` ranks own one more: 7 on 4 ranks are 2, 2, 2, 1.
    #[default]
    Contiguous,
    /// `2 * ranks` chunks by the same rule, of which rank `r` owns number `r` and number `2 * ranks - 1 - r`. Under a
    /// causal mask every rank then has the same work (as Llama 3 was trained, arXiv 2407.21783).
    Zigzag,
    /// Both halves of the dimension contiguously, each by itself: of a video that comes twice, clean and then noisy, each
    /// rank owns the clean *and* the noisy tokens of its part. Of an odd length the second half has one more.
    Halves,
    /// Any ranges; they must cover the dimension exactly once.
    Explicit(Parts),
}

impl Split {
    /// One range a rank; [`Contiguous`](Self::Contiguous) if they are those.
    pub fn ranges(ranges: Vec<Range<usize>>) -> Self {
        let filled = |range: &Range<usize>| Some(range.clone()).filter(|range| !range.is_empty());
        let len = ranges.iter().map(|range| range.len()).sum();
        let even = Parts::contiguous(len, ranges.len());
        let is_even = ranges
            .iter()
            .enumerate()
            .all(|(rank, range)| filled(range) == filled(&even.of(rank)[0]));
        match is_even {
            true => Split::Contiguous,
            false => Split::Explicit(Parts::new(
                ranges.iter().map(|range| filled(range).into_iter().collect()).collect(),
            )),
        }
    }

    /// Packed documents, each of which sees only itself, under a causal mask: every document is cut into `2 * ranks`
    /// chunks, of which rank `r` owns number `r` and number `2 * ranks - 1 - r`, as [`Zigzag`](Self::Zigzag) does with
    /// the whole. So every rank has the same work, however long the documents are.
    ///
    /// Tokens that do not divide go to the ranks with the fewest: over all documents together, two ranks differ by at
    /// most one token. Among those, the rank with less work so far gets the later token, which sees more, so differences
    /// do not add up over the documents.
    ///
    /// `lengths` are the documents' tokens in order; their sum is the length of the dimension.
    ///
    /// # Panics
    /// If there are no ranks.
    pub fn zigzag_documents(lengths: &[usize], ranks: usize) -> Self {
        assert!(ranks > 0, "split: documents cannot be dealt to 0 ranks");
        let chunks = 2 * ranks;
        let mut owned: Vec<Vec<Range<usize>>> = vec![Vec::new(); ranks];
        // Of each rank, the leftover tokens and the (query, key) pairs so far.
        let (mut leftovers, mut work) = (vec![0; ranks], vec![0; ranks]);
        let mut start = 0;
        for length in lengths {
            let mut dealt = vec![0; ranks];
            for _ in 0..length % chunks {
                // Ranks differ by at most one, so the fewest always have a chunk left to take it.
                let next = (0..ranks)
                    .filter(|rank| dealt[*rank] < 2)
                    .min_by_key(|rank| (leftovers[*rank], work[*rank]))
                    .expect("fewer leftovers than chunks");
                dealt[next] += 1;
                leftovers[next] += 1;
            }
            let all: usize = work.iter().sum();
            let late: Vec<bool> = work.iter().map(|work| work * ranks <= all).collect();
            let mut from = 0;
            for chunk in 0..chunks {
                let second = chunk >= ranks;
                let rank = if second { chunks - 1 - chunk } else { chunk };
                let longer = dealt[rank] == 2 || (dealt[rank] == 1 && late[rank] == second);
                let to = from + length / chunks + usize::from(longer);
                owned[rank].push(start + from..start + to);
                // The token at `t` of a document sees `t + 1`.
                work[rank] += (to * (to + 1) - from * (from + 1)) / 2;
                from = to;
            }
            start += length;
        }
        Split::Explicit(Parts::new(owned.into_iter().map(joined).collect()))
    }

    /// The split under which the busiest rank has the least attention to compute under a mask, of those that suit one:
    /// contiguous, zigzag, and zigzag by document for packed documents; of equals the first. Two ranks differ by at most
    /// one token.
    ///
    /// Under teacher forcing, if `len` holds both halves, it is zigzag over the tokens of a half and the same again over
    /// the other, so that a rank owns a clean token *and* its noisy twin, and tokens that bear a loss are balanced too.
    /// Two ranks differ by at most one token in each half, and by one of those past the halves. A cut may fall within
    /// a frame: whole ones would leave some ranks with more tokens, and others with none where frames are few.
    ///
    /// Pairs are counted query by query, once for each of these splits; a [custom](Mask::custom) mask is asked pair by
    /// pair.
    ///
    /// # Panics
    /// If there are no ranks.
    ///
    /// # Example
    /// ```
    /// use burn_sp::attention::Mask;
    /// use burn_sp::layout::Split;
    ///
    /// assert_eq!(Split::balanced(&Mask::Full, 8, 2), Split::Contiguous);
    /// assert_eq!(Split::balanced(&Mask::Causal, 8, 2), Split::Zigzag);
    /// ```
    pub fn balanced(mask: &Mask, len: usize, ranks: usize) -> Self {
        assert!(ranks > 0, "split: {len} positions cannot be dealt to 0 ranks");
        if let Some(half) = half_of(mask).filter(|half| *half <= len / 2) {
            return twins(half, len, ranks);
        }
        let keys = Positions::whole(len);
        let busiest = |split: &Split| {
            let parts = split.parts(len, ranks);
            let work = |rank| mask.visible_pairs(&Positions::new(parts.of(rank).to_vec()), &keys);
            (0..ranks).map(work).max()
        };
        let mut splits = vec![Split::Contiguous, Split::Zigzag];
        splits.extend(documents_of(mask, len).map(|lengths| Split::zigzag_documents(&lengths, ranks)));
        splits.into_iter().min_by_key(busiest).expect("there are splits")
    }

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
                        .map(|rank| joined([chunks.of(rank), chunks.of(2 * ranks - 1 - rank)].concat()))
                        .collect(),
                )
            }
            Split::Halves => {
                let half = len / 2;
                let [first, second] = [half, len - half].map(|len| Parts::contiguous(len, ranks));
                Parts::new(
                    (0..ranks)
                        .map(|rank| joined([first.of(rank), &moved(&second, rank, half)].concat()))
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
            Split::Halves => "by halves",
            Split::Explicit(_) => "explicit",
        })
    }
}

/// The length of the halves under teacher forcing.
fn half_of(mask: &Mask) -> Option<usize> {
    match mask {
        Mask::TeacherForcing { half, .. } => Some(*half),
        Mask::And(both) => both.iter().find_map(half_of),
        _ => None,
    }
}

/// Zigzag over the first half, and over the second alike; what lies past them sees nothing and goes anywhere.
fn twins(half: usize, len: usize, ranks: usize) -> Split {
    let tokens = Split::Zigzag.parts(half, ranks);
    let rest = Parts::contiguous(len - 2 * half, ranks);
    let owned = (0..ranks).map(|rank| {
        let own = [
            moved(&tokens, rank, 0),
            moved(&tokens, rank, half),
            moved(&rest, rank, 2 * half),
        ];
        joined(own.concat())
    });
    Split::Explicit(Parts::new(owned.collect()))
}

fn moved(parts: &Parts, rank: usize, by: usize) -> Vec<Range<usize>> {
    let ranges = parts.of(rank).iter();
    ranges.map(|range| range.start + by..range.end + by).collect()
}

/// The lengths of packed documents within `len` positions, and of what lies past them.
fn documents_of(mask: &Mask, len: usize) -> Option<Vec<usize>> {
    match mask {
        Mask::Documents { documents, .. } => {
            let mut lengths = Vec::new();
            let mut start = 0;
            while start < len {
                let end = documents
                    .containing(start)
                    .map_or(len, |document| document.end.min(len));
                lengths.push(end - start);
                start = end;
            }
            Some(lengths)
        }
        Mask::And(both) => both.iter().find_map(|mask| documents_of(mask, len)),
        _ => None,
    }
}

/// Ascending ranges as few non-empty ones.
fn joined(ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
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
    fn ranges_may_be_contiguous() {
        assert_eq!(Split::ranges(vec![0..2, 2..4, 4..5]), Split::Contiguous);
        // Where a range without positions starts does not matter.
        assert_eq!(Split::ranges(vec![0..1, 1..2, 7..7]), Split::Contiguous);
        let uneven = Split::ranges(vec![0..1, 1..4]);
        assert_eq!(uneven, Split::Explicit(Parts::new(vec![vec![0..1], vec![1..4]])));
    }

    #[test]
    fn every_rule_covers_every_position_once() {
        for split in [Split::Contiguous, Split::Zigzag, Split::Halves] {
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
