//! Dropout masks that depend on seed, stream and *global* element index only, so that every layout and every
//! recomputation draws the same one.

use crate::Positions;

/// The dropout mask of a tensor.
///
/// The generator is [Philox 4x32-10](crate::philox) with key `seed` and a counter made of the stream and the row-major
/// index of the element in the *global* tensor.
#[derive(Clone, Debug)]
pub struct DropoutSpec {
    /// Probability that an element is dropped, in `[0, 1)`.
    pub probability: f64,
    /// Key of the generator.
    pub seed: u64,
    /// Which mask: layer and step, mixed by the caller.
    pub stream: u64,
    /// Shape of the global tensor, in elements.
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

    /// The smallest word that stays.
    #[cfg(feature = "cube")]
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// Whether the element with this random word stays.
    #[inline(always)]
    pub fn keeps(&self, word: u32) -> bool {
        word >= self.threshold
    }
}

/// The global indices of a local part of a tensor, in local row-major order.
///
/// Trailing dimensions held whole, and the ranges of the dimension before them, are runs of consecutive global indices.
pub(crate) struct Runs {
    /// For each dimension before the runs, the innermost first, the global index at which each local position starts.
    outer: Vec<Vec<u64>>,
    /// Where each run starts in a local slab, and its global index there; a slab is one position of all of `outer`.
    pub runs: Vec<(usize, u64)>,
    /// Local elements of a slab.
    pub slab: usize,
}

impl Runs {
    /// The part at `positions`, one for each dimension of the global `shape`.
    pub fn new(shape: &[usize], positions: &[Positions]) -> Self {
        let dims = shape.len();
        let whole = |dim: usize| {
            let mut next = 0;
            positions[dim].ranges().iter().all(|range| {
                let joins = range.start == next;
                next = range.end;
                joins
            }) && next == shape[dim]
        };
        // The last dimension held in part, and how many elements lie behind one of its positions.
        let mut split = dims;
        let mut inner = 1;
        while split > 0 {
            split -= 1;
            if !whole(split) {
                break;
            }
            if split > 0 {
                inner *= shape[split];
            }
        }
        let mut runs = Vec::new();
        let mut slab = 0;
        let mut outer = Vec::new();
        if dims == 0 {
            runs.push((0, 0));
            slab = 1;
        } else {
            for range in positions[split].ranges() {
                runs.push((slab, (range.start * inner) as u64));
                slab += range.len() * inner;
            }
            let mut stride = (inner * shape[split]) as u64;
            for dim in (0..split).rev() {
                outer.push(positions[dim].iter().map(|position| position as u64 * stride).collect());
                stride *= shape[dim] as u64;
            }
        }
        Self { outer, runs, slab }
    }

    /// Global index that the runs of a slab count from.
    #[inline(always)]
    pub fn slab_start(&self, slab: usize) -> u64 {
        let mut rest = slab;
        let mut global = 0;
        for starts in &self.outer {
            global += starts[rest % starts.len()];
            rest /= starts.len();
        }
        global
    }

    /// Every run of the whole part: its first local element and that element's global index. Runs that continue each
    /// other are one.
    #[cfg(feature = "cube")]
    pub fn flat(&self) -> Vec<(usize, u64)> {
        let slabs: usize = self.outer.iter().map(Vec::len).product();
        let mut flat: Vec<(usize, u64)> = Vec::new();
        for slab in 0..slabs {
            let (start, global) = (slab * self.slab, self.slab_start(slab));
            for &(run, first) in &self.runs {
                let (local, global) = (start + run, global + first);
                let continues = flat
                    .last()
                    .is_some_and(|&(before, index)| index + (local - before) as u64 == global);
                if !continues {
                    flat.push((local, global));
                }
            }
        }
        flat
    }
}
