use std::{ops::Range, sync::Arc};

/// The global positions of a local run of tokens, as ascending ranges in local order.
///
/// A contiguous slice is one range, a zigzag slice two; a rank that owns nothing has none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Positions {
    ranges: Arc<[Range<usize>]>,
}

impl Positions {
    /// Positions from ranges in local order; empty ranges are dropped.
    pub fn new(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        Self {
            ranges: ranges.into_iter().filter(|range| !range.is_empty()).collect(),
        }
    }

    /// `0..len`: an unsharded dimension.
    pub fn whole(len: usize) -> Self {
        Self::new([0..len])
    }

    /// The ranges, in local order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// How many positions there are.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(|range| range.len()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every position, in local order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.ranges.iter().cloned().flatten()
    }
}
