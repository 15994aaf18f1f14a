use crate::{AttentionDropout, Mask, Positions};

/// Which key/value head a query head reads: `(head + offset) / ratio` (grouped-query attention, arXiv 2305.13245).
///
/// An unsharded layer has `offset` 0 and `ratio` = heads / kv heads. A rank that holds a slice of the heads, and the
/// key/value heads that slice needs, shifts by `offset` (heads per group may then be ragged at both ends).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadMap {
    /// Query heads that share one key/value head.
    pub ratio: usize,
    /// Position of the first local query head within the group of the first local key/value head.
    pub offset: usize,
}

impl HeadMap {
    /// The map of an unsharded layer.
    ///
    /// # Panics
    /// If `kv_heads` does not divide `heads`.
    pub fn new(heads: usize, kv_heads: usize) -> Self {
        assert!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "attention: {heads} query heads are no multiple of {kv_heads} key/value heads"
        );
        Self {
            ratio: heads / kv_heads,
            offset: 0,
        }
    }

    /// The local key/value head of a local query head.
    ///
    /// # Panics
    /// If `ratio` is 0.
    pub fn kv_head(&self, head: usize) -> usize {
        (head + self.offset) / self.ratio
    }
}

/// Everything an attention kernel needs to know beside its tensors.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Who sees whom, over global positions.
    pub mask: Mask,
    /// Global positions of the query rows.
    pub q_positions: Positions,
    /// Global positions of the key rows.
    pub k_positions: Positions,
    /// Factor of the scores before the softmax, usually `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// Which key/value head each query head reads.
    pub heads: HeadMap,
    /// Dropout of the attention weights, if any.
    pub dropout: Option<AttentionDropout>,
    /// Return outputs and gradients in the accumulation dtype (f32, f64 for f64), for callers that add up several.
    pub wide: bool,
}

/// How rotary embedding pairs the elements of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryStyle {
    /// Element `i` of the first half turns with element `i` of the second half (Llama in Hugging Face's layout).
    Halves,
    /// Elements `2i` and `2i + 1` turn together (the original paper, Wan).
    Interleaved,
}
