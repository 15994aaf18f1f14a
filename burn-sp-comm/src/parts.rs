//! Who owns which ranges of a dimension.

use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Per rank of a group, the ranges of a dimension that the rank owns, in its local order.
///
/// A rank's local slice is its ranges laid end to end. A contiguous split has one range a rank, a zigzag split two;
/// anything else is allowed, also a rank that owns nothing. Parts may overlap, e.g. where a key/value head is needed
/// by several ranks.
///
/// ```
/// use burn_sp_comm::Parts;
/// let zigzag = Parts::new(vec![vec![0..2, 6..8], vec![2..4, 4..6]]);
/// assert_eq!(zigzag.len_of(0), 4);
/// assert_eq!(zigzag.extent(), 8);
/// ```
///
/// Cloning shares the list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Vec<Vec<Range<usize>>>", into = "Vec<Vec<Range<usize>>>")]
pub struct Parts(Arc<[Vec<Range<usize>>]>);

impl Parts {
    /// From the ranges of every rank, by rank within the group. Nothing is checked here; collectives refuse parts that
    /// they cannot use.
    pub fn new(ranges: Vec<Vec<Range<usize>>>) -> Self {
        Parts(ranges.into())
    }

    /// One range a rank, as equal as can be, longer ones first: 7 on 4 ranks is 2, 2, 2, 1.
    pub fn contiguous(length: usize, ranks: usize) -> Self {
        let (each, longer) = (length / ranks.max(1), length % ranks.max(1));
        let mut start = 0;
        let range = |rank: usize| {
            let end = start + each + usize::from(rank < longer);
            let range = start..end;
            start = end;
            vec![range]
        };
        Parts((0..ranks).map(range).collect())
    }

    /// The ranges of `rank`, in its local order.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn of(&self, rank: usize) -> &[Range<usize>] {
        &self.0[rank]
    }

    /// How many indices `rank` owns: the length of its local slice.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn len_of(&self, rank: usize) -> usize {
        self.0[rank].iter().map(|range| range.len()).sum()
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.len()
    }

    /// The length of the whole dimension, in indices: the largest end of all ranges.
    pub fn extent(&self) -> usize {
        self.0.iter().flatten().map(|range| range.end).max().unwrap_or(0)
    }
}

impl From<Vec<Vec<Range<usize>>>> for Parts {
    fn from(ranges: Vec<Vec<Range<usize>>>) -> Self {
        Parts::new(ranges)
    }
}

impl From<Parts> for Vec<Vec<Range<usize>>> {
    fn from(parts: Parts) -> Self {
        parts.0.to_vec()
    }
}
