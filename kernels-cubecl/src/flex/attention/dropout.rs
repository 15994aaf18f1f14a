//! Dropout of attention weights: each tile's part of the mask, drawn where it is needed.

use super::{blocks::Block, real::Real};
use crate::{dropout::DropRule, philox::Philox, problem::Problem};

/// The mask of a call.
pub struct Dropout {
    philox: Philox,
    rule: DropRule,
    /// For each local batch row and head, the word of its first query and key in the global tensor.
    first: Vec<u64>,
    /// Words from one query to the next: all keys of the global tensor.
    stride: u64,
}

impl Dropout {
    /// None if the call drops nothing.
    pub fn of(p: &Problem) -> Option<Self> {
        let spec = p.spec.dropout.as_ref()?;
        let rule = DropRule::new(spec.probability)?;
        let [_, heads, queries, keys] = spec.shape.map(|len| len as u64);
        let first = |batch: usize, head: usize| (batch as u64 * heads + head as u64) * queries * keys;
        Some(Self {
            philox: Philox::new(spec.seed, spec.stream),
            rule,
            first: spec
                .batch
                .iter()
                .flat_map(|batch| spec.heads.iter().map(move |head| first(batch, head)))
                .collect(),
            stride: keys,
        })
    }

    /// The mask of a tile of one head, `row` being batch * heads + head.
    pub fn tile(&self, row: usize, queries: &Block, keys: &Block) -> DropoutTile {
        DropoutTile {
            philox: self.philox,
            rule: self.rule,
            first: self.first[row] + queries.first as u64 * self.stride + keys.first as u64,
            stride: self.stride,
        }
    }
}

/// The mask of a tile, a pure function of row and column.
#[derive(Clone, Copy)]
pub struct DropoutTile {
    philox: Philox,
    rule: DropRule,
    first: u64,
    stride: u64,
}

impl DropoutTile {
    /// The random words of a row.
    #[inline(always)]
    pub fn draw(&self, row: usize, words: &mut [u32]) {
        self.philox.fill(self.first + row as u64 * self.stride, words);
    }

    /// Drops the elements of a row by their words.
    #[inline(always)]
    pub fn drop<A: Real>(&self, words: &[u32], row: &mut [A]) {
        let scale = A::from_f64(self.rule.scale);
        for (x, &word) in row.iter_mut().zip(words) {
            *x = if self.rule.keeps(word) { *x * scale } else { A::ZERO };
        }
    }
}
