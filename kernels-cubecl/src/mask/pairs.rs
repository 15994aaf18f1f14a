//! How much there is to compute between two sets of positions.

use std::ops::Range;

use super::{Mask, Tile};
use crate::Positions;

impl Mask {
    /// Whether any of the queries sees any of the keys: if not, attention between them can be skipped.
    pub fn sees_any(&self, queries: &Positions, keys: &Positions) -> bool {
        range_pairs(queries, keys).any(|(queries, keys)| match self.tile(&queries, &keys) {
            Tile::Empty => false,
            Tile::Full => true,
            Tile::Mixed => queries
                .into_iter()
                .any(|query| !self.next_run(query, keys.clone()).is_empty()),
        })
    }

    /// How many pairs of a query and a key that it sees there are: the work of attention between them, exactly, to
    /// compare splits by.
    pub fn visible_pairs(&self, queries: &Positions, keys: &Positions) -> u64 {
        let in_ranges = |(queries, keys): (Range<usize>, Range<usize>)| match self.tile(&queries, &keys) {
            Tile::Empty => 0,
            Tile::Full => queries.len() as u64 * keys.len() as u64,
            Tile::Mixed => queries
                .flat_map(|query| self.runs(query, keys.clone()))
                .map(|run| run.len() as u64)
                .sum(),
        };
        range_pairs(queries, keys).map(in_ranges).sum()
    }
}

fn range_pairs<'a>(
    queries: &'a Positions,
    keys: &'a Positions,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + 'a {
    let pairs = |queries: &'a Range<usize>| keys.ranges().iter().map(|keys| (queries.clone(), keys.clone()));
    queries.ranges().iter().flat_map(pairs)
}
