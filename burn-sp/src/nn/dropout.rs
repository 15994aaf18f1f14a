use kernels_cubecl::DropoutSpec;

use crate::SpTensor;

/// What a dropout mask depends on beside the position of an element: seed, training step and layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    /// The run's seed.
    pub seed: u64,
    /// The training step (micro-steps counted), below 2^48.
    pub step: u64,
    /// Which dropout of the model, below 2^16.
    pub layer: u64,
}

impl DropoutKey {
    /// The stream of the generator that belongs to step and layer.
    pub(crate) fn stream(self) -> u64 {
        self.step << 16 | self.layer
    }

    /// The same step, another layer.
    pub fn layer(self, layer: u64) -> Self {
        Self { layer, ..self }
    }
}

/// Dropout (Srivastava et al., 2014) whose mask is a function of seed, step, layer and *global* element index: the same
/// on 1 and on 8 ranks, in any layout, and in a recomputed forward pass. Nothing is stored for backward.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Probability that an element is dropped, in `[0, 1)`.
    pub probability: f64,
}

impl Dropout {
    /// Applies the mask; without a key (evaluation) or with probability 0 the tensor passes as it is.
    ///
    /// # Shapes
    /// - `x`: any, and so is the result, in the layout of `x`
    ///
    /// # Panics
    /// If the tensor is partial: a sum of dropped terms is not a dropped sum. If the probability is not in `[0, 1)`.
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: SpTensor<D>, key: Option<DropoutKey>) -> SpTensor<D> {
        match self.mask(&x, key) {
            Some(spec) => x.tokenwise(|local| kernels_cubecl::dropout(local, spec)),
            None => x,
        }
    }

    /// The mask of this rank's part of a tensor, if any is applied.
    pub(crate) fn mask<const D: usize>(&self, x: &SpTensor<D>, key: Option<DropoutKey>) -> Option<DropoutSpec> {
        let key = key.filter(|_| self.probability > 0.0)?;
        Some(DropoutSpec {
            probability: self.probability,
            seed: key.seed,
            stream: key.stream(),
            shape: x.global_shape().to_vec(),
            positions: (0..D).map(|dim| x.positions(dim)).collect(),
        })
    }
}
