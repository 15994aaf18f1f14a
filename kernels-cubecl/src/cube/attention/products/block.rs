//! A block of the score matrix: some queries by some keys, of all heads.

use cubecl::prelude::*;

use super::super::{
    call::OnDevice,
    tables::{FULL, Run},
    tile::{Numbers, Sizes},
};

/// Where a block is, and how its mask is read.
#[derive(Clone, Copy)]
pub struct Block {
    /// First query and key.
    pub first: [usize; 2],
    /// Queries and keys.
    pub len: [usize; 2],
    /// Where the bits of its pattern start in the tables; none if it is seen in full.
    pub pattern_at: Option<usize>,
    /// Words in a row of a pattern.
    pub words: usize,
}

impl Block {
    /// Block `column` of a run in row `row` of blocks, each `size` by `size` except at the ends.
    pub fn new(tables: &OnDevice, [row, column]: [usize; 2], run: &Run, size: usize, tokens: [usize; 2]) -> Self {
        let first = [row * size, column * size];
        let words = size / 32;
        Self {
            first,
            len: [0, 1].map(|side| size.min(tokens[side] - first[side])),
            pattern_at: (run.pattern != FULL).then(|| tables.patterns_at + run.pattern as usize * size * words),
            words,
        }
    }

    pub fn mixed(&self) -> bool {
        self.pattern_at.is_some()
    }

    pub fn argument(&self) -> PlaceLaunch {
        let ([query, key], [queries, keys]) = (self.first, self.len);
        PlaceLaunch::new(query, key, queries, keys, self.pattern_at.unwrap_or(0), self.words)
    }
}

/// A [`Block`] as a kernel's argument.
#[derive(CubeLaunch, CubeType)]
pub struct Place {
    pub first_query: usize,
    pub first_key: usize,
    pub queries: usize,
    pub keys: usize,
    pub pattern_at: usize,
    pub words: usize,
}

/// A score times its scale; negative infinity if it is hidden.
#[cube]
pub fn score<A: Float>(
    product: A,
    query: usize,
    key: usize,
    tables: &Tensor<u32>,
    place: &Place,
    numbers: &Numbers,
    #[comptime] mixed: bool,
) -> A {
    let mut score = product * numbers.scale.get::<A>();
    if comptime!(mixed) {
        let bits = tables[place.pattern_at + query * place.words + key / 32];
        let seen = (bits >> (key % 32) as u32) & 1 == 1;
        score = select(seen, score, numbers.negative_infinity.get::<A>());
    }
    score
}

/// The key/value head of local row `row` of `[batch * heads]`, as a row of `[batch * kv_heads]`.
#[cube]
pub fn kv_row(row: usize, sizes: &Sizes) -> usize {
    row / sizes.heads * sizes.kv_heads + (row % sizes.heads + sizes.offset) / sizes.ratio
}
