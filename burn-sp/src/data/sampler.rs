use burn_sp_comm::Parts;

use super::Permutation;
use crate::layout::{Axis, Mesh};

/// Apart from the generator's streams of dropout, which are named by layer and step.
const STREAM: u64 = 0b11 << 62;

/// Which samples of a data set a step has, and which of them a data-parallel replica reads.
///
/// Epoch by epoch every sample comes exactly once, in an order that seed and epoch name; no order is ever stored. Steps take
/// the next samples of this endless row, so where an epoch ends within a step, the next one begins in it: nothing is
/// repeated, nothing is left out, and no step is short. Where the row is ended by [`with_epochs`](Self::with_epochs), the
/// last step has what is left.
///
/// A step's samples are a function of its number alone. They do not depend on the mesh: replicas divide them, the first ones
/// taking one more where they do not divide, as a tensor whose first dimension is sharded over [`Axis::Dp`] is laid out. All
/// ranks of a replica, which share the tokens of a sequence, read the same.
///
/// With gradient accumulation a step here is a micro-step, counted through all steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    samples: u64,
    batch: u64,
    seed: u64,
    epochs: Option<u64>,
}

impl Sampler {
    /// Of so many samples, `batch` in a step, over all replicas.
    ///
    /// # Panics
    /// If there are no samples, or none in a step.
    pub fn new(samples: u64, batch: usize, seed: u64) -> Self {
        assert!(
            samples > 0 && batch > 0,
            "sampler: {samples} samples, {batch} a step; there must be some"
        );
        Self {
            samples,
            batch: batch as u64,
            seed,
            epochs: None,
        }
    }

    /// Ends after so many epochs.
    pub fn with_epochs(self, epochs: u64) -> Self {
        Self {
            epochs: Some(epochs),
            ..self
        }
    }

    /// How many steps there are, if it ends.
    pub fn steps(&self) -> Option<u64> {
        self.end().map(|end| end.div_ceil(u128::from(self.batch)) as u64)
    }

    /// The epoch in which a step begins, and how many of its samples were taken before.
    pub fn position(&self, step: u64) -> (u64, u64) {
        let seen = u128::from(step) * u128::from(self.batch);
        let samples = u128::from(self.samples);
        ((seen / samples) as u64, (seen % samples) as u64)
    }

    /// The samples of a step, over all replicas; fewer in the last step, none after it.
    pub fn batch(&self, step: u64) -> Vec<u64> {
        let (mut epoch, mut offset) = self.position(step);
        let seen = u128::from(step) * u128::from(self.batch);
        let left = self.end().map_or(self.batch, |end| {
            end.saturating_sub(seen).min(u128::from(self.batch)) as u64
        });
        let mut order = self.order(epoch);
        let mut batch = Vec::with_capacity(left as usize);
        for _ in 0..left {
            if offset == self.samples {
                (epoch, offset) = (epoch + 1, 0);
                order = self.order(epoch);
            }
            batch.push(order.at(offset));
            offset += 1;
        }
        batch
    }

    /// The samples of a step that one of `replicas` reads; in the last step there may be none for some.
    ///
    /// # Panics
    /// If there is no such replica.
    pub fn share(&self, step: u64, replica: usize, replicas: usize) -> Vec<u64> {
        let batch = self.batch(step);
        let own = Parts::contiguous(batch.len(), replicas).of(replica)[0].clone();
        batch[own].to_vec()
    }

    /// The samples of a step that this rank's replica reads.
    pub fn own(&self, step: u64, mesh: &Mesh) -> Vec<u64> {
        self.share(step, mesh.coordinate(Axis::Dp), mesh.size(Axis::Dp))
    }

    fn order(&self, epoch: u64) -> Permutation {
        Permutation::new(self.samples, self.seed, STREAM | epoch)
    }

    /// How many samples there are in all epochs, if it ends.
    fn end(&self) -> Option<u128> {
        self.epochs.map(|epochs| u128::from(epochs) * u128::from(self.samples))
    }
}
