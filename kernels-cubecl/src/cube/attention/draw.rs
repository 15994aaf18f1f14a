//! Dropout of attention weights on the device: see [`AttentionDropout`](crate::AttentionDropout).

use cubecl::prelude::*;

use super::tile::Sizes;
use crate::{
    AttentionSpec, Positions,
    cube::philox::{Stream, word},
    dropout::DropRule,
    philox::halves,
};

/// The generator, and where in the tables the positions are.
#[derive(CubeLaunch, CubeType)]
pub struct Draw {
    positions_at: usize,
    /// The smallest word that stays.
    threshold: u32,
    stream: Stream,
}

/// Whether the weight of a local query and key stays.
#[cube]
pub fn stays(
    draw: &Draw,
    tables: &Tensor<u32>,
    sizes: &Sizes,
    batch: usize,
    head: usize,
    query: usize,
    key: usize,
) -> bool {
    // What is past the end is clamped: it is never used.
    let head_at = draw.positions_at + 2 * (batch * sizes.heads + head);
    let queries_at = draw.positions_at + 2 * sizes.batches * sizes.heads;
    let query_at = queries_at + 2 * min(query, sizes.queries - 1);
    let key_at = queries_at + 2 * sizes.queries + min(key, sizes.keys - 1);
    // The sum of the three is the element's index in the global tensor, in two words.
    let row = tables[head_at] + tables[query_at];
    let carry = select(row < tables[query_at], 1u32, 0u32);
    let low = row + tables[key_at];
    let carry = carry + select(low < row, 1u32, 0u32);
    let high = tables[head_at + 1] + tables[query_at + 1] + carry;
    word(low, high, &draw.stream) >= draw.threshold
}

/// The rule of a call that drops anything.
pub fn rule(spec: &AttentionSpec) -> Option<DropRule> {
    DropRule::new(spec.dropout.as_ref()?.probability)
}

impl DrawLaunch {
    /// The generator of a call; of none, if it drops nothing.
    pub fn of(spec: &AttentionSpec, positions_at: usize) -> Self {
        let (seed, stream) = spec
            .dropout
            .as_ref()
            .map_or((0, 0), |dropout| (dropout.seed, dropout.stream));
        let threshold = rule(spec).map_or(0, |rule| rule.threshold());
        Self::new(positions_at, threshold, Stream::argument(seed, stream))
    }
}

/// What of the position of an element in the global tensor `[batch, heads, queries, keys]` comes from each dimension: two
/// words for each local sample and head, two for each query, one for each key.
#[derive(Clone, Debug, PartialEq)]
pub struct Indices {
    shape: [usize; 4],
    batch: Positions,
    heads: Positions,
    queries: Positions,
    keys: Positions,
}

impl Indices {
    /// None if the call drops nothing.
    pub fn of(spec: &AttentionSpec) -> Option<Self> {
        rule(spec)?;
        let dropout = spec.dropout.as_ref()?;
        Some(Self {
            shape: dropout.shape,
            batch: dropout.batch.clone(),
            heads: dropout.heads.clone(),
            queries: spec.q_positions.clone(),
            keys: spec.k_positions.clone(),
        })
    }

    pub fn words(&self) -> Vec<u32> {
        let [_, heads, queries, keys] = self.shape.map(|len| len as u64);
        let row = |sample: usize| self.heads.iter().map(move |head| sample as u64 * heads + head as u64);
        let rows = self.batch.iter().flat_map(row).map(|row| row * queries * keys);
        let queries = self.queries.iter().map(|query| query as u64 * keys);
        let mut words: Vec<u32> = rows.chain(queries).flat_map(halves).collect();
        words.extend(
            self.keys
                .iter()
                .map(|key| u32::try_from(key).expect("fewer than 2^32 keys")),
        );
        words
    }
}
