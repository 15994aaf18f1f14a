//! The shape that most masks have: a band of keys that moves forward with the query, and a sink.

use std::{fmt::Debug, ops::Range};

use super::{MaskRule, Tile};

/// The keys that one query sees: those before `end` that lie at `start` or after, or before `sink`.
#[derive(Clone, Copy)]
pub struct Band {
    pub start: usize,
    pub end: usize,
    pub sink: usize,
}

/// A rule that gives each query a band. From one query to the next, `start` and `end` never go back, and `sink` is the
/// same for all.
pub trait Bands: Debug + Send + Sync {
    fn band(&self, query: usize) -> Band;

    /// The first query whose band ends behind `key`.
    fn first_past(&self, key: usize) -> usize;
}

/// Answers for a whole tile from three of its queries.
#[derive(Debug)]
pub struct Banded<B>(pub B);

impl<B: Bands> MaskRule for Banded<B> {
    fn visible(&self, query: usize, key: usize) -> bool {
        let band = self.0.band(query);
        key < band.end && (key >= band.start || key < band.sink)
    }

    fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        // Queries before this one do not reach the keys, and later ones leave more of them behind.
        let reaching = self.0.first_past(keys.start).max(queries.start);
        if reaching >= queries.end || self.next_run(reaching, keys.clone()).is_empty() {
            return Tile::Empty;
        }
        // The first query reaches least far, and the last one leaves most behind.
        let (first, last) = (self.0.band(queries.start), self.0.band(queries.end - 1));
        let reached = keys.end <= first.end;
        let kept = keys.end <= last.sink || last.start <= keys.start.max(last.sink);
        if reached && kept { Tile::Full } else { Tile::Mixed }
    }

    fn next_run(&self, query: usize, keys: Range<usize>) -> Range<usize> {
        let band = self.0.band(query);
        let (start, end) = if keys.start >= band.sink {
            (keys.start.max(band.start), band.end)
        } else if band.sink >= band.start {
            (keys.start, band.end)
        } else {
            (keys.start, band.end.min(band.sink))
        };
        start..end.min(keys.end).max(start)
    }
}

#[derive(Debug)]
pub struct Full;

impl Bands for Full {
    fn band(&self, _: usize) -> Band {
        Band {
            start: 0,
            end: usize::MAX,
            sink: 0,
        }
    }

    fn first_past(&self, _: usize) -> usize {
        0
    }
}

/// See [`Mask::Window`](super::Mask::Window); causal if its size has no bound.
#[derive(Debug)]
pub struct Window {
    pub size: usize,
    pub sink: usize,
}

impl Bands for Window {
    fn band(&self, query: usize) -> Band {
        let end = query.saturating_add(1);
        Band {
            start: end.saturating_sub(self.size),
            end,
            sink: self.sink,
        }
    }

    fn first_past(&self, key: usize) -> usize {
        key
    }
}
