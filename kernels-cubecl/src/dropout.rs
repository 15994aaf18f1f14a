//! Dropout masks that depend on seed, stream and *global* element index only, so that every layout and every
//! recomputation draws the same one.

use crate::Positions;

/// The dropout mask of a tensor.
///
/// The generator is Philox 4x32-10 with key `seed` and a counter made of the stream and the row-major index of the
/// element in the *global* tensor.
#[derive(Clone, Debug)]
pub struct DropoutSpec {
    /// Probability that an element is dropped, in `[0, 1)`.
    pub probability: f64,
    /// Key of the generator.
    pub seed: u64,
    /// Which mask: layer and step, mixed by the caller.
    pub stream: u64,
    /// Shape of the global tensor.
    pub shape: Vec<usize>,
    /// For each dimension, the global positions of the local elements.
    pub positions: Vec<Positions>,
}

/// The dropout mask of attention weights: that of [`DropoutSpec`] for the global tensor `[batch, heads, queries, keys]`,
/// which is never stored.
///
/// Weights are dropped after the softmax, and those that stay divided by the probability to stay; the softmax
/// statistics remain those of all scores. Where queries and keys lie is in [`AttentionSpec`](crate::AttentionSpec) already.
#[derive(Clone, Debug)]
pub struct AttentionDropout {
    /// Probability that a weight is dropped, in `[0, 1)`.
    pub probability: f64,
    /// Key of the generator.
    pub seed: u64,
    /// Which mask: layer and step, mixed by the caller.
    pub stream: u64,
    /// Batch, query heads, queries and keys of the global tensor.
    pub shape: [usize; 4],
    /// Global positions of the local batch rows.
    pub batch: Positions,
    /// Global positions of the local query heads.
    pub heads: Positions,
}

/// What is wrong with the mask of a tensor of shape `local` that is part of one of shape `global`, if anything is.
pub(crate) fn check(
    probability: f64,
    global: &[usize],
    positions: &[&Positions],
    local: &[usize],
) -> Result<(), String> {
    if !(0.0..1.0).contains(&probability) {
        return Err(format!("the probability is {probability}, expected one in [0, 1)"));
    }
    let given: Vec<usize> = positions.iter().map(|positions| positions.len()).collect();
    if given != local {
        return Err(format!("the positions are those of a {given:?}, expected {local:?}"));
    }
    if global.len() != local.len() {
        return Err(format!(
            "the global shape {global:?} has another number of dimensions than {local:?}"
        ));
    }
    for (dim, (positions, &len)) in positions.iter().zip(global).enumerate() {
        let end = positions.ranges().iter().map(|range| range.end).max().unwrap_or(0);
        if end > len {
            return Err(format!(
                "there are positions up to {end} in dimension {dim}, past the global shape {global:?}"
            ));
        }
    }
    Ok(())
}

/// Which elements a random word drops, and by what the others are multiplied.
#[derive(Clone, Copy)]
pub(crate) struct DropRule {
    threshold: u32,
    /// One over the probability to stay.
    pub scale: f64,
}

impl DropRule {
    /// None if nothing is dropped.
    pub fn new(probability: f64) -> Option<Self> {
        (probability != 0.0).then(|| Self {
            // The cast saturates; only a probability within 2^-32 of 1 gets there.
            threshold: (probability * 2f64.powi(32)).ceil() as u32,
            scale: 1.0 / (1.0 - probability),
        })
    }

    /// Whether the element with this random word stays.
    #[inline(always)]
    pub fn keeps(&self, word: u32) -> bool {
        word >= self.threshold
    }
}
