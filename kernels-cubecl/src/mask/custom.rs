use std::{fmt::Debug, ops::Range, sync::Arc};

use super::Tile;

/// A visibility rule of one's own, for [`Mask::custom`](super::Mask::custom).
///
/// Only [`visible`](Self::visible) is required. What is provided beside it is right for any rule, but asks about one
/// pair at a time, several times a tile and head: override it where attention is to be fast. Like every mask, the rule
/// must be the same on all ranks.
pub trait MaskRule: Debug + Send + Sync {
    /// Whether the query at global position `query` sees the key at `key`.
    fn visible(&self, query: usize, key: usize) -> bool;

    /// Classifies a tile of global query and key positions, neither empty. [`Tile::Mixed`] is always right;
    /// [`Tile::Empty`] and [`Tile::Full`] must be true.
    fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        let _ = (queries, keys);
        Tile::Mixed
    }

    /// The first run of keys within `keys` that `query` sees, or a first part of it; empty only if it sees none. A run
    /// that reaches beyond `keys` makes its caller panic.
    fn next_run(&self, query: usize, keys: Range<usize>) -> Range<usize> {
        let start = keys.clone().find(|&key| self.visible(query, key)).unwrap_or(keys.end);
        let end = (start..keys.end).find(|&key| !self.visible(query, key));
        start..end.unwrap_or(keys.end)
    }
}

/// A shared [`MaskRule`].
#[derive(Clone, Debug)]
pub struct CustomMask(Arc<dyn MaskRule>);

impl CustomMask {
    pub(super) fn new(rule: impl MaskRule + 'static) -> Self {
        Self(Arc::new(rule))
    }
}

/// The rule, with its answers checked: kernels go to memory by them.
impl MaskRule for CustomMask {
    fn visible(&self, query: usize, key: usize) -> bool {
        self.0.visible(query, key)
    }

    fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        self.0.tile(queries, keys)
    }

    fn next_run(&self, query: usize, keys: Range<usize>) -> Range<usize> {
        let run = self.0.next_run(query, keys.clone());
        assert!(
            run.is_empty() || keys.start <= run.start && run.end <= keys.end,
            "mask: {:?} answers {run:?} for query {query}, expected a run within the keys asked about, {keys:?}",
            self.0
        );
        run
    }
}

impl PartialEq for CustomMask {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CustomMask {}
