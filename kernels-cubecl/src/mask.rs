use std::ops::Range;

/// Who sees whom: a rule over *global* positions, not a matrix, so that it means the same on any split.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Mask {
    /// Every query sees every key.
    Full,
    /// A query sees keys at its own position and before.
    #[default]
    Causal,
}

/// What a mask lets through between a run of queries and a run of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No query sees any key: skip the tile.
    Empty,
    /// Every query sees every key: no test needed.
    Full,
    /// Some do: ask [`Mask::visible`] for each query.
    Mixed,
}

impl Mask {
    /// Whether the query at global position `query` sees the key at `key`.
    pub fn visible(&self, query: usize, key: usize) -> bool {
        match self {
            Mask::Full => true,
            Mask::Causal => key <= query,
        }
    }

    /// Classifies a tile of global query and key positions. Never says [`Tile::Empty`] or [`Tile::Full`] wrongly.
    pub fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        if queries.is_empty() || keys.is_empty() {
            return Tile::Empty;
        }
        match self {
            Mask::Full => Tile::Full,
            Mask::Causal if keys.end <= queries.start + 1 => Tile::Full,
            Mask::Causal if keys.start >= queries.end => Tile::Empty,
            Mask::Causal => Tile::Mixed,
        }
    }
}
