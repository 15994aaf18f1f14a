use std::{ops::Range, sync::Arc};

use super::band::{Band, Bands};

/// Where documents lie that are packed one after another into a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Documents {
    ends: Arc<[usize]>,
}

impl Documents {
    /// Documents of these lengths, which may be 0.
    ///
    /// # Panics
    /// If the lengths add up to more than a `usize` holds.
    pub fn new(lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0usize;
        let ends = lengths.into_iter().map(|len| {
            end = end
                .checked_add(len)
                .unwrap_or_else(|| panic!("documents: a length of {len} after {end} tokens is beyond any sequence"));
            end
        });
        Self { ends: ends.collect() }
    }

    /// Documents from where each starts and the last ends (`cu_seqlens` elsewhere): `[0, 3, 8]` for lengths 3 and 5.
    ///
    /// # Panics
    /// If the offsets do not start at 0 or descend.
    pub fn from_offsets(offsets: &[usize]) -> Self {
        assert!(
            offsets.first() == Some(&0),
            "documents: the first offset is {:?}, expected 0, the start of the first document",
            offsets.first()
        );
        if let Some(i) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            panic!(
                "documents: offset {} is {} after {}, expected ascending offsets",
                i + 1,
                offsets[i + 1],
                offsets[i]
            );
        }
        Self {
            ends: offsets[1..].into(),
        }
    }

    /// How many positions the documents have together.
    pub fn total(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The positions of the document that `position` lies in; none past the last one.
    pub fn containing(&self, position: usize) -> Option<Range<usize>> {
        // Passes over empty documents, which contain nothing.
        let document = self.ends.partition_point(|&end| end <= position);
        let end = *self.ends.get(document)?;
        let start = document.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(start..end)
    }
}

/// See [`Mask::Documents`](super::Mask::Documents).
#[derive(Debug)]
pub struct DocumentBands<'a> {
    pub documents: &'a Documents,
    pub causal: bool,
}

impl Bands for DocumentBands<'_> {
    fn band(&self, query: usize) -> Band {
        let total = self.documents.total();
        let Range { start, end } = self.documents.containing(query).unwrap_or(total..total);
        Band {
            start,
            end: if self.causal {
                end.min(query.saturating_add(1))
            } else {
                end
            },
            sink: 0,
        }
    }

    fn first_past(&self, key: usize) -> usize {
        match self.documents.containing(key) {
            Some(_) if self.causal => key,
            Some(document) => document.start,
            None => usize::MAX,
        }
    }
}
