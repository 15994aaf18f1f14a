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
    /// Some do: ask [`Mask::runs`] for each query.
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

    /// The first run of keys within `keys` that `query` sees; empty if it sees none of them.
    ///
    /// Together with [`tile`](Self::tile) this is all a kernel asks of a mask. Two runs may touch, so a rule may be
    /// answered piece by piece.
    pub fn next_run(&self, query: usize, keys: Range<usize>) -> Range<usize> {
        match self {
            Mask::Full => keys,
            Mask::Causal => keys.start..keys.end.min(query.saturating_add(1)).max(keys.start),
        }
    }

    /// All runs of keys within `keys` that `query` sees, ascending and disjoint.
    pub fn runs(&self, query: usize, keys: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut rest = keys;
        std::iter::from_fn(move || {
            let run = self.next_run(query, rest.clone());
            rest.start = run.end;
            (!run.is_empty()).then_some(run)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every tile and every row of keys over a few positions, against the definition.
    #[test]
    fn tiles_and_runs_agree_with_visible() {
        const END: usize = 7;
        let ranges = || (0..=END).flat_map(|start| (start..=END).map(move |end| start..end));
        for mask in [Mask::Full, Mask::Causal] {
            for keys in ranges() {
                for query in 0..END {
                    let runs: Vec<_> = mask.runs(query, keys.clone()).collect();
                    assert!(runs.windows(2).all(|pair| pair[0].end <= pair[1].start));
                    let listed: Vec<_> = runs.into_iter().flatten().collect();
                    let seen: Vec<_> = keys.clone().filter(|&key| mask.visible(query, key)).collect();
                    assert_eq!(listed, seen, "{mask:?}, query {query}, keys {keys:?}");
                }
                for queries in ranges() {
                    let pairs = queries.len() * keys.len();
                    let seen_by = |query| keys.clone().filter(|&key| mask.visible(query, key)).count();
                    let seen: usize = queries.clone().map(seen_by).sum();
                    let right = match mask.tile(&queries, &keys) {
                        Tile::Empty => seen == 0,
                        Tile::Full => seen == pairs,
                        Tile::Mixed => 0 < seen && seen < pairs,
                    };
                    assert!(
                        right,
                        "{mask:?}, queries {queries:?}, keys {keys:?}: {seen} of {pairs} seen"
                    );
                }
            }
        }
    }
}
