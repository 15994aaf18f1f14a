//! How the score matrix is cut into tiles, and what a mask lets through in each.

use std::ops::Range;

use super::real::Real;
use crate::{Mask, Positions, Tile};

/// Largest number of queries and keys in a tile.
pub const QUERIES: usize = 128;
pub const KEYS: usize = 384;

/// A run of rows that is contiguous in memory and in global position.
#[derive(Clone, Debug)]
pub struct Block {
    /// Local rows.
    pub rows: Range<usize>,
    /// Global position of the first.
    pub first: usize,
}

impl Block {
    /// Cuts `positions` into blocks of at most `size` rows, none of which straddles a range.
    pub fn cut(positions: &Positions, size: usize) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut local = 0;
        for range in positions.ranges() {
            for first in range.clone().step_by(size) {
                let len = size.min(range.end - first);
                blocks.push(Block {
                    rows: local..local + len,
                    first,
                });
                local += len;
            }
        }
        blocks
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn positions(&self) -> Range<usize> {
        self.first..self.first + self.len()
    }

    /// The part of the block at these positions.
    fn at(&self, positions: Range<usize>) -> Block {
        let start = self.rows.start + (positions.start - self.first);
        Block {
            rows: start..start + positions.len(),
            first: positions.start,
        }
    }
}

/// The part of a tile that has to be computed.
pub struct Visible {
    /// From the first to the last key that any query of the tile sees.
    pub keys: Block,
    /// Whether some query does not see some of these keys.
    pub mixed: bool,
}

impl Visible {
    pub fn of(mask: &Mask, queries: &Block, keys: &Block) -> Option<Visible> {
        let (all, seen) = (queries.positions(), keys.positions());
        match mask.tile(&all, &seen) {
            Tile::Empty => None,
            Tile::Full => Some(Visible {
                keys: keys.clone(),
                mixed: false,
            }),
            Tile::Mixed => {
                let (mut start, mut end, mut pairs) = (seen.end, seen.start, 0);
                for run in all.flat_map(|query| mask.runs(query, seen.clone())) {
                    start = start.min(run.start);
                    end = end.max(run.end);
                    pairs += run.len();
                }
                (start < end).then(|| Visible {
                    keys: keys.at(start..end),
                    mixed: pairs < queries.len() * (end - start),
                })
            }
        }
    }

    /// Sets the scores of hidden pairs to negative infinity.
    pub fn hide<A: Real>(&self, mask: &Mask, queries: &Block, scores: &mut [A], stride: usize) {
        if !self.mixed {
            return;
        }
        let keys = self.keys.positions();
        for (i, query) in queries.positions().enumerate() {
            let row = &mut scores[i * stride..i * stride + keys.len()];
            let mut hidden = 0;
            for run in mask.runs(query, keys.clone()) {
                row[hidden..run.start - keys.start].fill(A::NEG_INFINITY);
                hidden = run.end - keys.start;
            }
            row[hidden..].fill(A::NEG_INFINITY);
        }
    }
}
