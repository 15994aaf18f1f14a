use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::Device;
use burn_sp_comm::Parts;

use crate::SpDevice;
use crate::data::{PackedSequence, TokenBatch, TokenSequences};
use crate::layout::Axis;

/// Sequences, each token with its label: an item that a [`SpStep`](super::SpStep) can take, whole and the same on every
/// rank. What a rank computes on is the [`TokenBatch`] that [`distribute`](Self::distribute) makes of it.
///
/// It is in host memory; of the tokens only a rank's own come to its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenItem {
    /// Of one length.
    pub sequences: Vec<PackedSequence>,
    /// Whether attention ends where documents end, as [`TokenBatch::packed`] has it; or not, as [`TokenBatch::rows`].
    pub packed: bool,
}

impl TokenItem {
    /// To predict each token from those before it, from windows of one token more than the sequence length; a row for
    /// each.
    ///
    /// # Panics
    /// If a window has fewer than two tokens.
    pub fn from_windows(windows: impl IntoIterator<Item = impl AsRef<[u32]>>) -> Self {
        let sequence = |window: &[u32]| match window {
            [tokens @ .., next] if !tokens.is_empty() => PackedSequence::new(tokens, Some(*next), &[], tokens.len()),
            _ => panic!(
                "TokenItem: windows of {} tokens leave none to predict from; use 2 at least",
                window.len()
            ),
        };
        Self {
            sequences: windows.into_iter().map(|window| sequence(window.as_ref())).collect(),
            packed: false,
        }
    }

    /// Tokens, labels and mask of this rank: each replica takes its sequences, each rank its tokens of them.
    ///
    /// Of an item with fewer sequences than `dp`, as the last of an epoch may be, some ranks would have nothing to compute:
    /// they get a sequence without labels, which counts in no loss, gradient or metric. So do replicas with fewer packed
    /// sequences than others.
    ///
    /// # Panics
    /// If there are fewer tokens in a row than ranks to share it, or rows are not of one length.
    #[track_caller]
    pub fn distribute(self, device: &SpDevice) -> TokenBatch {
        let Self { mut sequences, packed } = self;
        let (mesh, replicas) = (device.mesh(), device.mesh().size(Axis::Dp));
        let len = sequences.first().map_or(0, |sequence| sequence.tokens.len());
        let count = match packed {
            true => sequences.len().next_multiple_of(replicas),
            false => sequences.len().max(replicas),
        };
        sequences.resize(count, PackedSequence::ignored(len));
        let own = &sequences[Parts::contiguous(count, replicas).of(mesh.coordinate(Axis::Dp))[0].clone()];
        let row = if packed { own.len() * len } else { len };
        assert!(
            mesh.shape().fits(row),
            "TokenItem: rows of {row} tokens on {}: a rank would have no token; use longer ones, or fewer ranks",
            mesh.shape()
        );
        match packed {
            true => TokenBatch::packed(own, device),
            false => TokenBatch::rows(own, count, device),
        }
    }
}

/// Makes [`TokenItem`]s, for Burn's data loaders: of [`PackedSequence`]s, as [`pack`](crate::data::pack) makes them and as
/// [`TokenSequences`] are a data set of; or of windows of one token more than the sequence length.
#[derive(Clone, Copy, Debug)]
pub struct TokenBatcher {
    packed: bool,
}

impl TokenBatcher {
    /// Each sequence a row that is seen causally, whatever documents it has.
    pub fn rows() -> Self {
        Self { packed: false }
    }

    /// Attention ends where documents end: for [`TokenSequences::with_boundaries`].
    pub fn packed() -> Self {
        Self { packed: true }
    }
}

impl Batcher<PackedSequence, TokenItem> for TokenBatcher {
    fn batch(&self, sequences: Vec<PackedSequence>, _device: &Device) -> TokenItem {
        let packed = self.packed;
        TokenItem { sequences, packed }
    }
}

impl Batcher<Vec<u32>, TokenItem> for TokenBatcher {
    fn batch(&self, windows: Vec<Vec<u32>>, _device: &Device) -> TokenItem {
        let packed = self.packed;
        TokenItem {
            packed,
            ..TokenItem::from_windows(windows)
        }
    }
}

/// For Burn's data loaders, with a [`TokenBatcher`].
impl Dataset<PackedSequence> for TokenSequences {
    fn get(&self, index: usize) -> Result<PackedSequence, DatasetError> {
        self.get(index as u64).map_err(DatasetError::new)
    }

    fn len(&self) -> usize {
        self.count() as usize
    }
}
