use burn_sp::attention::{AttentionCache, Mask};

/// Keys and values of the tokens that a sequence has so far, of all blocks: what [`Transformer::forward_cached`] reads and
/// extends. It begins empty, and takes its size from the model.
///
/// Each rank of `ring` and `ulysses` keeps the tokens that its layout gives it (of tokens that are whole on these P ranks, as the
/// generated ones are, one in P), each of `dp` its samples, and each of `tp` the key/value heads that its query heads read.
/// Nothing that is kept is ever sent. Under a window, tokens that no later one sees are dropped. It has a layer's
/// [`AttentionCache`] for each block.
///
/// [`Transformer::forward_cached`]: super::Transformer::forward_cached
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    layers: Vec<AttentionCache>,
    mask: Option<Mask>,
    tokens: usize,
}

impl KvCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many tokens the sequence has so far, those that are kept no more included: the next one's position.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes that this rank keeps, with the room for up to 64 tokens more.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(AttentionCache::bytes).sum()
    }

    /// So many tokens come next, under a mask; returns the position of the first.
    #[track_caller]
    pub(super) fn expect(&mut self, tokens: usize, blocks: usize, mask: &Mask) -> usize {
        let begun = self.mask.get_or_insert_with(|| {
            self.layers = vec![AttentionCache::default(); blocks];
            mask.clone()
        });
        assert!(
            begun == mask,
            "kv cache: it was begun under {begun:?}, and {mask:?} comes now; what is kept depends on the mask, so use one"
        );
        assert!(
            self.layers.len() == blocks,
            "kv cache: it is that of a model of {} blocks, not of {blocks}; use a new one",
            self.layers.len()
        );
        let first = self.tokens;
        self.tokens += tokens;
        first
    }

    pub(super) fn layers(&mut self) -> &mut [AttentionCache] {
        &mut self.layers
    }
}
