use std::ops::Range;

use super::{
    Blocks, MaskRule, Tile,
    band::Banded,
    blocks::{Before, BlockBands, Within},
};

/// See [`Mask::TeacherForcing`](super::Mask::TeacherForcing).
#[derive(Debug)]
pub struct TeacherForcing {
    pub blocks: Blocks,
    pub half: usize,
}

impl TeacherForcing {
    /// The two runs of keys that a query sees, either of which may be empty.
    fn runs(&self, query: usize) -> [Range<usize>; 2] {
        let half = self.half;
        let within = |position| {
            let block = self.blocks.containing(position);
            block.start..block.end.min(half)
        };
        match self.place(query) {
            Some((Half::Clean, position)) => [0..within(position).end, half..half],
            Some((Half::Noisy, position)) => {
                let block = within(position);
                [0..block.start, half + block.start..half + block.end]
            }
            None => [0..0, 0..0],
        }
    }

    /// Which half a position lies in, and where within it.
    fn place(&self, position: usize) -> Option<(Half, usize)> {
        let past = position.checked_sub(self.half);
        match past {
            None => Some((Half::Clean, position)),
            Some(past) => (past < self.half).then_some((Half::Noisy, past)),
        }
    }

    /// The part of a range in each half, counted from the start of that half, and whether there is more.
    fn cut(&self, range: &Range<usize>) -> ([(Half, Range<usize>); 2], bool) {
        let half = self.half;
        let clamp = |position: usize| position.saturating_sub(half).min(half);
        let parts = [
            (Half::Clean, range.start.min(half)..range.end.min(half)),
            (Half::Noisy, clamp(range.start)..clamp(range.end)),
        ];
        let inside = parts.iter().map(|(_, part)| part.len()).sum::<usize>();
        (parts, inside < range.len())
    }
}

#[derive(Clone, Copy)]
enum Half {
    Clean,
    Noisy,
}

impl MaskRule for TeacherForcing {
    fn visible(&self, query: usize, key: usize) -> bool {
        self.runs(query).iter().any(|run| run.contains(&key))
    }

    fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        let (queries, queries_past) = self.cut(queries);
        let (keys, keys_past) = self.cut(keys);
        let blocks = self.blocks;
        let (mut some, mut all) = (false, !queries_past && !keys_past);
        for (seeing, queries) in queries.into_iter().filter(|(_, part)| !part.is_empty()) {
            for (seen, keys) in keys.iter().filter(|(_, part)| !part.is_empty()) {
                let tile = match (seeing, seen) {
                    (Half::Clean, Half::Clean) => Banded(BlockBands {
                        blocks,
                        window: None,
                        sink: 0,
                    })
                    .tile(&queries, keys),
                    (Half::Noisy, Half::Clean) => Banded(Before(blocks)).tile(&queries, keys),
                    (Half::Noisy, Half::Noisy) => Banded(Within(blocks)).tile(&queries, keys),
                    (Half::Clean, Half::Noisy) => Tile::Empty,
                };
                some |= tile != Tile::Empty;
                all &= tile == Tile::Full;
            }
        }
        match (some, all) {
            (false, _) => Tile::Empty,
            (true, true) => Tile::Full,
            (true, false) => Tile::Mixed,
        }
    }

    fn next_run(&self, query: usize, keys: Range<usize>) -> Range<usize> {
        let within = |run: Range<usize>| run.start.max(keys.start)..run.end.min(keys.end);
        let [first, second] = self.runs(query).map(within);
        if first.is_empty() { second } else { first }
    }
}
