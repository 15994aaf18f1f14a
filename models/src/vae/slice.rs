//! Encoding without any exchange: each rank takes the raw frames that its latents depend on, and encodes those before its
//! own again. For frames that ranks read from files; where frames are sharded already, [`Vae::encode`] repeats nothing.

use std::{fmt, ops::Range};

use burn::tensor::Tensor;
use burn_sp::{SpDevice, SpTensor};

use super::Vae;
use super::frames::TIME;

/// What a rank encodes to get its latents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodeSlice {
    /// The latents that it keeps.
    pub keep: Range<usize>,
    /// The frames of the clip that it encodes.
    pub frames: Range<usize>,
    /// How many latents before those that it keeps come out, and are dropped.
    pub drop: usize,
}

impl EncodeSlice {
    /// How many latents come out.
    pub fn encoded(&self) -> usize {
        self.drop + self.keep.len()
    }
}

/// Latents would come out wrong, silently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HaloTooSmall {
    /// The halo asked for, in latents.
    pub halo: usize,
    /// The smallest that would do, in latents.
    pub needed: usize,
    /// How many frames before its newest a latent depends on.
    pub receptive_field: usize,
}

impl fmt::Display for HaloTooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "vae: a halo of {} latents is too small for a latent that depends on {} frames before its own; make it {}",
            self.halo, self.receptive_field, self.needed
        )
    }
}

impl std::error::Error for HaloTooSmall {}

impl Vae {
    /// How many frames before its newest a latent depends on, computed from the encoder's layers.
    pub fn receptive_field(&self) -> usize {
        let windows = self.encoder.windows();
        windows
            .iter()
            .rev()
            .fold(0, |behind, window| behind * window.stride() + window.behind())
    }

    /// The smallest halo with which latents come out right wherever a slice begins, in latents.
    pub fn least_halo(&self) -> usize {
        // Which is the first output of each layer that depends on nothing before the slice.
        let windows = self.encoder.windows();
        let first = windows
            .iter()
            .fold(0, |first, window| (first + window.behind()).div_ceil(window.stride()));
        // The slice's first latent, of its first frame alone, comes before the halo.
        first.saturating_sub(1)
    }

    /// What to encode to keep these latents, with `halo` latents before them.
    ///
    /// The encoder takes a slice's first frame alone, which gives one latent more to drop, unless it is the clip's first.
    ///
    /// # Errors
    /// If the halo is smaller than [`least_halo`](Self::least_halo), and the clip does not begin within it.
    pub fn slice(&self, keep: Range<usize>, halo: usize) -> Result<EncodeSlice, HaloTooSmall> {
        let stride = self.temporal_stride;
        if keep.is_empty() {
            return Ok(EncodeSlice {
                keep,
                frames: 0..0,
                drop: 0,
            });
        }
        let first = keep.start.saturating_sub(halo);
        let alone = usize::from(first > 0);
        let frames = stride * (first - alone)..1 + stride * (keep.end - 1);
        if frames.start > 0 && halo < self.least_halo() {
            return Err(HaloTooSmall {
                halo,
                needed: self.least_halo(),
                receptive_field: self.receptive_field(),
            });
        }
        Ok(EncodeSlice {
            drop: alone + keep.start - first,
            keep,
            frames,
        })
    }

    /// [`encode`](Self::encode) of a slice of a clip, by this rank alone.
    ///
    /// # Shapes
    /// - `frames`: `[batch, pixel channels, frames of the slice, height, width]`; returns `[batch, latent channels, latents
    ///   kept, height / stride, width / stride]`
    ///
    /// # Panics
    /// If there are other frames than the slice's, or as [`encode`](Self::encode).
    #[track_caller]
    pub fn encode_slice(&self, frames: Tensor<5>, slice: &EncodeSlice, device: &SpDevice) -> Tensor<5> {
        let count = frames.dims()[TIME];
        assert!(
            count == slice.frames.len(),
            "vae: {count} frames were given; give the slice's, {:?}",
            slice.frames
        );
        // To the layers these are a clip that no axis shards: they exchange nothing.
        let latents = self.encode(SpTensor::replicated(frames, device)).into_local();
        latents.slice_dim(TIME, slice.drop..slice.encoded())
    }
}
