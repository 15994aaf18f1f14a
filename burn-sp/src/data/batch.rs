use burn::tensor::{Int, Tensor, TensorData};

use super::PackedSequence;
use crate::attention::Mask;
use crate::layout::{Axis, Layout, Split};
use crate::{SpDevice, SpTensor};

/// What a model is trained on in a micro-step: each replica reads its own sequences and each rank keeps its own tokens.
///
/// Tokens and labels have the layout of [`SpDevice::sequence_layout`].
#[derive(Clone, Debug)]
pub struct TokenBatch {
    /// Token ids, `[batch, tokens]`.
    pub tokens: SpTensor<2, Int>,
    /// Of each token the one that follows, `[batch, tokens]`; negative where there is none.
    pub labels: SpTensor<2, Int>,
    /// Who sees whom in this replica's sequences.
    pub mask: Mask,
}

impl TokenBatch {
    /// A row for each sequence, seen causally whatever documents it has: what follows a document's end sees what was before.
    ///
    /// `own` are this replica's sequences, of `batch` over all replicas: those of [`Sampler::own`](super::Sampler::own).
    ///
    /// # Shapes
    /// - tokens and labels: `[batch, tokens]`
    ///
    /// # Panics
    /// If the replica has none, or not as many as its share of `batch` is; or they have different lengths.
    #[track_caller]
    pub fn rows(own: &[PackedSequence], batch: usize, device: &SpDevice) -> Self {
        let len = own.first().map_or(0, |sequence| sequence.tokens.len());
        assert!(
            len > 0 && own.iter().all(|sequence| sequence.tokens.len() == len),
            "TokenBatch::rows: a replica needs sequences, of one length; of fewer samples than replicas, give those without \
             PackedSequence::ignored"
        );
        let (tokens, labels) = joined(own);
        Self {
            tokens: distribute(tokens, [own.len(), len], batch, device),
            labels: distribute(labels, [own.len(), len], batch, device),
            mask: Mask::Causal,
        }
    }

    /// One row for each replica: its sequences end to end, each document seen causally by its own tokens alone.
    ///
    /// A mask is of positions and not of samples, so sequences with different documents share a row, in which no document
    /// reaches across a sequence's end. Positions count through the row: under rotary positions, which are relative, that
    /// changes nothing; learned ones must be as many as the row is long.
    ///
    /// Each replica has to have as many sequences, as all rows are as long: [`PackedSequence::ignored`] fills up. No rank
    /// knows how many the others have, so this is not checked. Where a replica has more than one, dropout of attention
    /// weights, which is drawn for a row and two places in it, depends on the number of replicas; other dropout does not.
    ///
    /// # Shapes
    /// - tokens and labels: `[replicas, tokens of the replica's sequences]`
    ///
    /// # Panics
    /// If the replica has no sequence.
    #[track_caller]
    pub fn packed(own: &[PackedSequence], device: &SpDevice) -> Self {
        let (tokens, labels) = joined(own);
        assert!(
            !tokens.is_empty(),
            "TokenBatch::packed: a replica needs sequences; give PackedSequence::ignored to one without"
        );
        let (shape, replicas) = ([1, tokens.len()], device.mesh().size(Axis::Dp));
        Self {
            tokens: distribute(tokens, shape, replicas, device),
            labels: distribute(labels, shape, replicas, device),
            mask: Mask::documents(own.iter().flat_map(|sequence| sequence.documents.iter().copied())),
        }
    }
}

fn joined(sequences: &[PackedSequence]) -> (Vec<i64>, Vec<i64>) {
    let tokens = sequences.iter().flat_map(|sequence| &sequence.tokens);
    let labels = sequences.iter().flat_map(|sequence| &sequence.labels);
    (tokens.copied().map(i64::from).collect(), labels.copied().collect())
}

/// This rank's tokens of the rows of its replica, of `batch` rows over all replicas.
#[track_caller]
fn distribute(values: Vec<i64>, shape: [usize; 2], batch: usize, device: &SpDevice) -> SpTensor<2, Int> {
    let rows = Tensor::from_data(TensorData::new(values, shape), device.device());
    let global = [batch, shape[1]];
    let layout = Layout::replicated(global).shard(0, Axis::Dp, Split::Contiguous);
    let rows = SpTensor::from_local(rows, layout, device);
    let layout = device.sequence_layout(global);
    let tokens = layout.shards(1).iter().cloned();
    tokens.fold(rows, |rows, (axis, split)| rows.shard(axis, 1, split))
}
