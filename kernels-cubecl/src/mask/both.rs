use std::ops::Range;

use super::{Mask, MaskRule, Tile};

/// See [`Mask::and`].
impl MaskRule for [Mask; 2] {
    fn visible(&self, query: usize, key: usize) -> bool {
        self.iter().all(|mask| mask.visible(query, key))
    }

    fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        match self.each_ref().map(|mask| mask.tile(queries, keys)) {
            [Tile::Empty, _] | [_, Tile::Empty] => Tile::Empty,
            [Tile::Full, tile] | [tile, Tile::Full] => tile,
            // The two may have nothing in common here; only the runs tell.
            [Tile::Mixed, Tile::Mixed] => Tile::Mixed,
        }
    }

    fn next_run(&self, query: usize, mut keys: Range<usize>) -> Range<usize> {
        let [one, other] = self;
        loop {
            let run = one.next_run(query, keys.clone());
            let common = other.next_run(query, run.clone());
            if run.is_empty() || !common.is_empty() {
                return common;
            }
            keys.start = run.end;
        }
    }
}
