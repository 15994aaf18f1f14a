use std::ops::Range;

use burn::tensor::Tensor;
use burn_sp::comm::Parts;
use burn_sp::layout::{Axis, Layout, Split};
use burn_sp::{SpDevice, SpTensor};

use super::VideoGrid;

/// Keys and values of the frames that a video has so far, for those to come: what [`VideoDit::forward_cached`] reads and
/// extends.
///
/// It keeps what a block may see: all frames, or the first (the sink) and the latest, as many together as the window has.
/// That is what [`VideoMask::local`] lets through of a window of the rest (but for a last block that is shorter: there the
/// mask counts from where it would end). Cached keys and values have no gradient. Keys are kept turned to their absolute positions.
/// Each rank of `ring` keeps the keys of its own tokens, each of `ulysses` and `tp` those of its own heads.
///
/// [`VideoDit::forward_cached`]: super::VideoDit::forward_cached
/// [`VideoMask::local`]: super::VideoMask::local
#[derive(Clone, Debug)]
pub struct VideoCache {
    layers: Vec<LayerCache>,
    window: Option<usize>,
    sink: usize,
    /// The latest block.
    block: Range<usize>,
}

impl VideoCache {
    /// An empty cache of a model of so many blocks. Without a window it keeps all frames; a window counts the frames that
    /// stay, the block's own and the first `sink` included.
    ///
    /// # Panics
    /// If the sink leaves nothing of the window.
    pub fn new(layers: usize, window: Option<usize>, sink: usize) -> Self {
        if let Some(window) = window {
            assert!(
                sink < window,
                "video cache: a sink of {sink} frames leaves nothing of a window of {window}"
            );
        }
        Self {
            layers: vec![LayerCache::default(); layers],
            window,
            sink,
            block: 0..0,
        }
    }

    /// Frames that the video has so far, those that are kept no more included: the next block starts there.
    pub fn frames(&self) -> usize {
        self.block.end
    }

    /// Bytes that this rank keeps.
    pub fn bytes(&self) -> usize {
        let of = |segment: &Segment| {
            let bytes = |tensor: &Tensor<4>| tensor.shape().num_elements() * tensor.dtype().size();
            bytes(&segment.keys) + bytes(&segment.values)
        };
        self.layers.iter().flat_map(|layer| &layer.segments).map(of).sum()
    }

    /// A block comes, for the first time or again.
    pub(super) fn expect(&mut self, first: usize, block: &VideoGrid) {
        let (window, end) = (self.window.unwrap_or(usize::MAX), first + block.frames);
        assert!(
            first == self.frames() || (first..end) == self.block,
            "video cache: frames {first}..{end} come after {:?}; give the next ones, or those again",
            self.block
        );
        assert!(
            block.frames <= window - self.sink,
            "video cache: a block of {} frames does not fit into a window of {window}, of which {} are the first frames'",
            block.frames,
            self.sink
        );
        let tokens = |frames: usize| frames * block.tokens_per_frame();
        let latest = end.saturating_sub(window - self.sink).max(self.sink);
        let dropped = if end > window {
            tokens(self.sink)..tokens(latest)
        } else {
            0..0
        };
        for layer in &mut self.layers {
            layer.expected = tokens(first)..tokens(end);
            layer.dropped = dropped.clone();
        }
        self.block = first..end;
    }

    pub(super) fn layers(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }
}

/// The keys and values of one block of the model.
#[derive(Clone, Debug, Default)]
pub struct LayerCache {
    segments: Vec<Segment>,
    /// The tokens that come next, of the whole video.
    expected: Range<usize>,
    /// Those that no one sees any more.
    dropped: Range<usize>,
}

/// Tokens that came together.
#[derive(Clone, Debug)]
struct Segment {
    /// Of the whole video.
    tokens: Range<usize>,
    /// Which of them each rank of the ring has, counted from the first.
    parts: Parts,
    keys: Tensor<4>,
    values: Tensor<4>,
}

impl LayerCache {
    /// Takes up the keys and values of the tokens that were announced; returns those of all that are seen.
    ///
    /// # Shapes
    /// - `keys`, `values`: `[batch, tokens, heads, head_dim]`, and so is what it returns
    pub(super) fn extend(&mut self, keys: SpTensor<4>, values: SpTensor<4>) -> (SpTensor<4>, SpTensor<4>) {
        let device = SpDevice::new(keys.local().device(), keys.mesh().clone());
        let ring = device.mesh().size(Axis::Ring);
        let layout = keys.layout().clone();
        let len = layout.shape()[1];
        let parts = match layout.shards(1).first() {
            Some((Axis::Ring, split)) => split.parts(len, ring),
            _ => Parts::contiguous(len, ring),
        };
        // The block again, or what is no longer seen.
        self.segments.retain(|segment| segment.tokens != self.expected);
        let (dropped, rank) = (self.dropped.clone(), device.mesh().coordinate(Axis::Ring));
        let kept = self
            .segments
            .drain(..)
            .flat_map(|segment| segment.without(&dropped, rank));
        self.segments = kept.collect();
        self.segments.push(Segment {
            tokens: self.expected.clone(),
            parts,
            keys: own(keys.into_local()),
            values: own(values.into_local()),
        });

        let total: usize = self.segments.iter().map(|segment| segment.tokens.len()).sum();
        let mut all = vec![Vec::new(); ring];
        let mut start = 0;
        for segment in &self.segments {
            for (rank, all) in all.iter_mut().enumerate() {
                let own = segment.parts.of(rank).iter();
                all.extend(own.map(|range| start + range.start..start + range.end));
            }
            start += segment.tokens.len();
        }
        let layout = with_tokens(&layout, total, Split::Explicit(Parts::new(all)));
        let joined = |of: fn(&Segment) -> &Tensor<4>| {
            let tensors = self.segments.iter().map(|segment| of(segment).clone());
            SpTensor::from_local(Tensor::cat(tensors.collect(), 1), layout.clone(), &device)
        };
        (joined(|segment| &segment.keys), joined(|segment| &segment.values))
    }
}

impl Segment {
    /// What is left without some tokens of the video: what lies before them, and behind.
    fn without(self, dropped: &Range<usize>, rank: usize) -> Vec<Self> {
        let Range { start, end } = self.tokens;
        if dropped.end <= start || end <= dropped.start {
            return vec![self];
        }
        let left = [start..dropped.start.max(start), dropped.end.min(end)..end];
        let left = left.into_iter().filter(|tokens| !tokens.is_empty());
        left.map(|tokens| self.part(tokens, rank)).collect()
    }

    /// Some tokens of it.
    fn part(&self, tokens: Range<usize>, rank: usize) -> Self {
        let start = self.tokens.start;
        let kept = tokens.start - start..tokens.end - start;
        let within = |range: &Range<usize>| {
            let from = range.start.clamp(kept.start, kept.end);
            from..range.end.clamp(from, kept.end)
        };
        let moved = |range: &Range<usize>| {
            let own = within(range);
            own.start - kept.start..own.end - kept.start
        };
        let of = |rank| self.parts.of(rank).iter().map(moved).collect();
        // Where they lie among this rank's.
        let mut before = 0;
        let mut local = Vec::new();
        for range in self.parts.of(rank) {
            let own = within(range);
            if !own.is_empty() {
                local.push(before + own.start - range.start..before + own.end - range.start);
            }
            before += range.len();
        }
        let select = |tensor: &Tensor<4>| match local.is_empty() {
            true => tensor.clone().slice_dim(1, 0..0),
            false => {
                let parts = local.iter().map(|range| tensor.clone().slice_dim(1, range.clone()));
                Tensor::cat(parts.collect(), 1)
            }
        };
        Self {
            keys: own(select(&self.keys)),
            values: own(select(&self.values)),
            parts: Parts::new((0..self.parts.ranks()).map(of).collect()),
            tokens,
        }
    }
}

/// Outside any graph, and in memory of its own: a view would hold on to all that it is a part of.
fn own(tensor: Tensor<4>) -> Tensor<4> {
    tensor.detach().mul_scalar(1.0)
}

/// The layout with other tokens, split over the ring as given.
fn with_tokens(layout: &Layout, tokens: usize, split: Split) -> Layout {
    let mut shape = layout.shape().to_vec();
    shape[1] = tokens;
    let dims = (0..shape.len()).filter(|dim| *dim != 1);
    let whole = Layout::replicated(shape).shard(1, Axis::Ring, split);
    dims.fold(whole, |all, dim| {
        let shards = layout.shards(dim).iter();
        shards.fold(all, |all, (axis, split)| all.shard(dim, *axis, split.clone()))
    })
}
