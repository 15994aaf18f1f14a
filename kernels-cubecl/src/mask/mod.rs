mod band;
mod blocks;
mod both;
mod custom;
mod documents;
mod pairs;
mod teacher_forcing;
#[cfg(test)]
mod tests;

use std::{ops::Range, sync::Arc};

use self::{
    band::{Banded, Full, Window},
    blocks::BlockBands,
    documents::DocumentBands,
    teacher_forcing::TeacherForcing,
};
pub use self::{
    blocks::Blocks,
    custom::{CustomMask, MaskRule},
    documents::Documents,
};

/// Who sees whom: a rule over *global* positions, not a matrix, so that it means the same on any split.
///
/// ```
/// use kernels_cubecl::{Mask, Positions};
///
/// // Documents of 3 and 5 tokens in one sequence; each token sees the last 4 of its own document.
/// let mask = Mask::documents([3, 5]).and(Mask::Window { size: 4, sink: 0 });
/// let all = Positions::whole(8);
/// assert_eq!(mask.visible_pairs(&all, &all), 1 + 2 + 3 + 1 + 2 + 3 + 4 + 4);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Mask {
    /// Every query sees every key.
    Full,
    /// A query sees keys at its own position and before.
    #[default]
    Causal,
    /// Causal, and of the keys that leaves, only the last `size` and the first positions of all, which keep a model
    /// stable that has never seen them fade (attention sinks: Xiao et al., "Efficient Streaming Language Models with
    /// Attention Sinks", arXiv 2309.17453).
    Window {
        /// How many positions a query sees back, its own included.
        size: usize,
        /// How many positions at the start of the sequence stay visible, beside the window.
        sink: usize,
    },
    /// A query sees keys of its own document, where several are packed into one sequence. See [`Mask::documents`].
    Documents {
        /// Where each document lies.
        documents: Documents,
        /// Whether a query sees only keys at its own position and before.
        causal: bool,
    },
    /// A query sees keys of its own block and of earlier ones: causal from frame to frame of a video, say, and full
    /// within a frame.
    BlockCausal {
        /// How positions fall into blocks.
        blocks: Blocks,
        /// If given, only as many positions, back from the end of the query's block (which counts whole, even where
        /// the sequence ends within it), stay visible.
        window: Option<usize>,
        /// How many positions at the start of the sequence stay visible, beside the window.
        sink: usize,
    },
    /// Teacher forcing of a block-wise denoiser, over a sequence of two halves, clean tokens and then noisy ones, both
    /// of the same frames. Clean queries see clean blocks up to their own; noisy queries see clean blocks before their
    /// own, and their own noisy block.
    ///
    /// Positions count through both halves (the rotary positions of a noisy token are those of its clean twin).
    /// Positions past the second half see nothing and are seen by none.
    TeacherForcing {
        /// How the positions within a half fall into blocks.
        blocks: Blocks,
        /// Positions in each half.
        half: usize,
    },
    /// What both of two masks let through. See [`Mask::and`].
    And(Arc<[Mask; 2]>),
    /// A rule of one's own. See [`Mask::custom`].
    Custom(CustomMask),
}

/// What a mask lets through between a run of queries and a run of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No query sees any key: skip the tile.
    Empty,
    /// Every query sees every key: no test needed.
    Full,
    /// Some do, or it would cost too much to say: ask [`Mask::runs`] for each query.
    Mixed,
}

impl Mask {
    /// Documents of these lengths, one after another, each seen causally by its own tokens only: what training on
    /// packed sequences needs. A length may be 0. Positions past the last document see nothing and are seen by none.
    ///
    /// # Panics
    /// If the lengths add up to more than a `usize` holds.
    pub fn documents(lengths: impl IntoIterator<Item = usize>) -> Self {
        Self::Documents {
            documents: Documents::new(lengths),
            causal: true,
        }
    }

    /// As [`documents`](Self::documents), from where each starts and the last ends (`cu_seqlens` elsewhere): `[0, 3, 8]`
    /// for lengths 3 and 5.
    ///
    /// # Panics
    /// If the offsets do not start at 0 or descend.
    pub fn documents_from_offsets(offsets: &[usize]) -> Self {
        Self::Documents {
            documents: Documents::from_offsets(offsets),
            causal: true,
        }
    }

    /// As [`documents`](Self::documents), but a token sees the whole of its document.
    ///
    /// # Panics
    /// If the lengths add up to more than a `usize` holds.
    pub fn whole_documents(lengths: impl IntoIterator<Item = usize>) -> Self {
        Self::Documents {
            documents: Documents::new(lengths),
            causal: false,
        }
    }

    /// [`BlockCausal`](Self::BlockCausal) without window.
    pub fn block_causal(blocks: Blocks) -> Self {
        Self::BlockCausal {
            blocks,
            window: None,
            sink: 0,
        }
    }

    /// A mask of one's own rule. Two such masks are equal if one is a clone of the other.
    pub fn custom(rule: impl MaskRule + 'static) -> Self {
        Self::Custom(CustomMask::new(rule))
    }

    /// Lets through what both masks do.
    pub fn and(self, other: Mask) -> Self {
        match (self, other) {
            (Mask::Full, mask) | (mask, Mask::Full) => mask,
            (one, other) if one == other => one,
            (one, other) => Mask::And(Arc::new([one, other])),
        }
    }

    /// Whether the query at global position `query` sees the key at `key`.
    pub fn visible(&self, query: usize, key: usize) -> bool {
        self.ask(|rule| rule.visible(query, key))
    }

    /// Classifies a tile of global query and key positions. Never says [`Tile::Empty`] or [`Tile::Full`] wrongly; says
    /// [`Tile::Mixed`] wrongly only for [`Mask::And`] and [`Mask::Custom`].
    pub fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        if queries.is_empty() || keys.is_empty() {
            return Tile::Empty;
        }
        self.ask(|rule| rule.tile(queries, keys))
    }

    /// The first run of keys within `keys` that `query` sees; empty if it sees none of them.
    ///
    /// Together with [`tile`](Self::tile) this is all a kernel asks of a mask. Two runs may touch, so a rule may be
    /// answered piece by piece.
    ///
    /// # Panics
    /// If the [`MaskRule`] of a [`Mask::Custom`] answers with keys beyond `keys`.
    pub fn next_run(&self, query: usize, keys: Range<usize>) -> Range<usize> {
        if keys.is_empty() {
            return keys;
        }
        self.ask(|rule| rule.next_run(query, keys))
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

    /// Puts a question to the rule behind the name.
    fn ask<R>(&self, question: impl FnOnce(&dyn MaskRule) -> R) -> R {
        match self {
            Mask::Full => question(&Banded(Full)),
            Mask::Causal => question(&Banded(Window {
                size: usize::MAX,
                sink: 0,
            })),
            &Mask::Window { size, sink } => question(&Banded(Window { size, sink })),
            &Mask::Documents { ref documents, causal } => question(&Banded(DocumentBands { documents, causal })),
            &Mask::BlockCausal { blocks, window, sink } => question(&Banded(BlockBands { blocks, window, sink })),
            &Mask::TeacherForcing { blocks, half } => question(&TeacherForcing { blocks, half }),
            Mask::And(both) => question(&**both),
            Mask::Custom(custom) => question(custom),
        }
    }
}
