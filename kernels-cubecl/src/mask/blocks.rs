use std::ops::Range;

use super::band::{Band, Bands};

/// How positions fall into blocks of one length, of which the first may have a length of its own (in image-to-video the
/// first frame stands alone).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    first: usize,
    len: usize,
}

impl Blocks {
    /// Blocks of `len` positions.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn new(len: usize) -> Self {
        assert!(len > 0, "blocks: the length is 0, expected at least 1");
        Self { first: len, len }
    }

    /// The first block has `len` positions instead.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn with_first(self, len: usize) -> Self {
        assert!(len > 0, "blocks: the length of the first is 0, expected at least 1");
        Self { first: len, ..self }
    }

    /// The positions of the block that `position` lies in.
    pub fn containing(&self, position: usize) -> Range<usize> {
        let Some(past) = position.checked_sub(self.first) else {
            return 0..self.first;
        };
        let start = position - past % self.len;
        start..start.saturating_add(self.len)
    }
}

/// See [`Mask::BlockCausal`](super::Mask::BlockCausal).
#[derive(Debug)]
pub struct BlockBands {
    pub blocks: Blocks,
    pub window: Option<usize>,
    pub sink: usize,
}

impl Bands for BlockBands {
    fn band(&self, query: usize) -> Band {
        let end = self.blocks.containing(query).end;
        Band {
            start: self.window.map_or(0, |window| end.saturating_sub(window)),
            end,
            sink: self.sink,
        }
    }

    fn first_past(&self, key: usize) -> usize {
        self.blocks.containing(key).start
    }
}

/// Only the blocks before a query's own.
#[derive(Debug)]
pub struct Before(pub Blocks);

impl Bands for Before {
    fn band(&self, query: usize) -> Band {
        Band {
            start: 0,
            end: self.0.containing(query).start,
            sink: 0,
        }
    }

    fn first_past(&self, key: usize) -> usize {
        self.0.containing(key).end
    }
}

/// Only a query's own block.
#[derive(Debug)]
pub struct Within(pub Blocks);

impl Bands for Within {
    fn band(&self, query: usize) -> Band {
        let Range { start, end } = self.0.containing(query);
        Band { start, end, sink: 0 }
    }

    fn first_past(&self, key: usize) -> usize {
        self.0.containing(key).start
    }
}
