use burn::tensor::{Tensor, TensorData};
use burn_sp::layout::{Axis, Layout, Split};
use burn_sp::{SpDevice, SpTensor};

use super::{FrameBlocks, VideoGrid, input_patches};

/// A rank's part of a batch of videos. A rank that never has the whole batch makes the patches of its own tokens with
/// [`SpTensor::from_local`].
#[derive(Clone, Debug)]
pub struct VideoInput {
    /// How the tokens of a video lie.
    pub grid: VideoGrid,
    /// Patches of the latents, `[batch, tokens, channels * patch * patch]`; see [`input_patches`].
    pub patches: SpTensor<3>,
    /// Each frame's time, `[batch, frames]`, of all samples: 0 is clean, 1000 is noise. On the host and in f32 at least: in
    /// bf16, times above 512 are 4 apart.
    pub times: TensorData,
    /// States of the text encoder, `[batch, text tokens, text_dim]`, samples laid out as those of the patches, all tokens
    /// on every rank. Every one of them is attended: a checkpoint trained on padded texts wants its padding.
    pub text: SpTensor<3>,
    /// If given, the text holds a prompt for each of these blocks, one after another and equally long, and a block attends
    /// its own alone.
    pub prompts: Option<FrameBlocks>,
}

impl VideoInput {
    /// Takes this rank's samples and tokens of a batch that every rank has whole: samples over `dp`, tokens as
    /// [`SpDevice::sequence_layout`] has them. Under teacher forcing the latents hold the clean frames and then the noisy
    /// ones; [`Split::balanced`] then is the ring split that gives every rank its frames' clean *and* noisy tokens.
    ///
    /// # Shapes
    /// - `latents`: `[batch, channels, frames, height, width]`, frames those of the sequence
    /// - `times`: `[batch, frames]`, `text`: `[batch, text tokens, text_dim]`
    ///
    /// # Panics
    /// If the latents are not patches of the grid.
    #[track_caller]
    pub fn partition(
        grid: VideoGrid,
        latents: Tensor<5>,
        times: TensorData,
        text: Tensor<3>,
        device: &SpDevice,
    ) -> Self {
        let [_, _, frames, height, width] = latents.dims();
        let patch = height / grid.rows.max(1);
        assert!(
            [height, width] == [grid.rows * patch, grid.columns * patch] && frames.is_multiple_of(grid.frames.max(1)),
            "video input: {frames} frames of {height} x {width} latents are not square patches of {grid:?}"
        );
        let patches = input_patches(latents, patch);
        let layout = device.sequence_layout(patches.dims());
        let samples = Layout::replicated(text.dims()).shard(0, Axis::Dp, Split::Contiguous);
        Self {
            grid,
            patches: device.distribute(patches, &layout),
            times,
            text: device.distribute(text, &samples),
            prompts: None,
        }
    }

    /// The times of this rank's samples at some frames of the sequence.
    pub(super) fn times_at(&self, frames: &[usize]) -> TensorData {
        let all: Vec<f64> = self.times.iter::<f64>().collect();
        let width = self.times.shape()[1];
        let samples = self.patches.positions(0);
        let of = |sample: usize| frames.iter().map(move |frame| sample * width + frame);
        let values: Vec<f64> = samples.iter().flat_map(of).map(|index| all[index]).collect();
        TensorData::new(values, [samples.len(), frames.len()])
    }
}
