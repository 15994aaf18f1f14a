use burn::config::Config;
use burn_sp::layout::{Axis, Split};
use burn_sp::train::LossShare;
use burn_sp::{SpDevice, SpTensor};
use serde::{Deserialize, Serialize};

use super::{FlowSchedule, FrameBlocks, VideoDit, VideoGrid, VideoInput, VideoMask, VideoOptions, VideoPartition};

/// What a block of frames sees of those before it, while it learns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Forcing {
    /// The clean frames, which stand before the noisy ones in a sequence twice as long: what it will see when it samples.
    #[default]
    Teacher,
    /// The noisy frames themselves, each block with a noise level of its own (Chen et al., "Diffusion Forcing", arXiv
    /// 2407.01392).
    Diffusion,
}

/// What a [`VideoDit`] learns: the velocity, noise minus clean latents, of blocks of frames at drawn noise levels.
///
/// Noise levels are drawn for each block, noise for each element, both by their global index.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
/// use burn_sp_models::video_dit::{
///     FrameBlocks, VideoBatch, VideoDitConfig, VideoGrid, VideoKey, VideoObjective, VideoOptions,
/// };
///
/// // 3 frames of 2 x 2 patches, a block each, by teacher forcing.
/// let grid = VideoGrid { frames: 3, rows: 2, columns: 2 };
/// let config = VideoDitConfig::new(4, 24, 48, 2, 1).with_text_dim(8);
/// let ranks = LaunchConfig::new(MeshShape::ulysses(2));
/// launch(&ranks, &Device::flex().autodiff(), |device: SpDevice| {
///     let model = device.seeded(1, |device| config.init(device));
///     let partition = VideoObjective::new(FrameBlocks::new(1)).partition(grid, 1, &device);
///     let latents = Tensor::<5>::ones([1, 4, 3, 4, 4], device.device());
///     let batch = VideoBatch {
///         latents: partition.own(latents),
///         texts: Tensor::ones([1, 1, 5, 8], device.device()),
///         valid_frames: vec![],
///     };
///     let sample = partition.sample(batch, VideoKey { seed: 1, step: 0 });
///     // All 48 latents x 4 channels bear loss, in the noisy half of the sequence.
///     assert_eq!(sample.count, 48 * 4);
///     sample.loss(&model, sample.count, &VideoOptions::default()).backward();
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct VideoObjective {
    /// The blocks that are denoised one after another.
    pub blocks: FrameBlocks,
    /// What blocks see of earlier ones.
    #[config(default = "Forcing::Teacher")]
    pub forcing: Forcing,
    /// Whether the first frame is given, as a block of its own: it is clean, and bears no loss.
    #[config(default = "false")]
    pub image_to_video: bool,
    /// Under diffusion forcing, how many frames a block sees, back from its end; all if none is given.
    #[config(default = "None")]
    pub window: Option<usize>,
    /// How many frames at the start stay visible beside the window.
    #[config(default = "0")]
    pub sink: usize,
    /// The shift of the noise levels: see [`FlowSchedule`].
    #[config(default = "5.0")]
    pub shift: f64,
    /// The probability that a sample learns with zeros for its text, which classifier-free guidance needs.
    #[config(default = "0.0")]
    pub text_dropout: f64,
}

impl VideoObjective {
    /// What cannot work, in one line; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        if !(self.shift.is_finite() && self.shift > 0.0) {
            return Some(format!("a shift of {}; use one above 0, such as 5", self.shift));
        }
        if !(0.0..=1.0).contains(&self.text_dropout) {
            return Some(format!("a text dropout of {}; use 0 to 1", self.text_dropout));
        }
        if self.forcing == Forcing::Teacher && self.window.is_some() {
            return Some(
                "teacher forcing sees all clean frames; leave the window out, or use diffusion forcing".into(),
            );
        }
        self.mask().problem()
    }

    /// The blocks, the first frame one of its own where it is given.
    pub fn blocks(&self) -> FrameBlocks {
        match self.image_to_video {
            true => self.blocks.with_image_first(),
            false => self.blocks,
        }
    }

    /// Who sees whom.
    pub fn mask(&self) -> VideoMask {
        let blocks = self.blocks();
        match (self.forcing, self.window) {
            (Forcing::Teacher, _) => VideoMask::teacher_forcing(blocks),
            (Forcing::Diffusion, None) => VideoMask::block_causal(blocks),
            (Forcing::Diffusion, Some(window)) => VideoMask::local(blocks, window, self.sink),
        }
    }

    /// Who has which samples, frames and tokens of a batch: to be made once, and asked at every step.
    ///
    /// # Panics
    /// If the objective has a [`problem`](Self::problem), or there are fewer samples than data-parallel ranks.
    pub fn partition(&self, grid: VideoGrid, batch: usize, device: &SpDevice) -> VideoPartition {
        if let Some(problem) = self.problem() {
            panic!("video objective: {problem}");
        }
        VideoPartition::new(self.clone(), FlowSchedule::new(self.shift), grid, batch, device)
    }
}

/// A rank's part of a training batch; made by [`VideoPartition::sample`].
#[derive(Clone, Debug)]
pub struct VideoSample {
    /// What the model reads.
    pub input: VideoInput,
    /// Who sees whom.
    pub mask: VideoMask,
    /// The velocity that the model should find, laid out as the input's patches, of which it has the shape; 0 for clean
    /// copies. It must be finite also where there is no loss. In f32 at least.
    pub target: SpTensor<3>,
    /// What each token's squared error counts, `[batch, tokens, 1]`: the weight of its noise level, 0 without loss.
    pub weights: SpTensor<3>,
    /// How many elements of all ranks bear loss, whatever their weight.
    pub count: u64,
}

impl VideoSample {
    /// The weighted mean of squared errors over the elements that bear loss, this rank's share of it. `count` is that
    /// of the [samples](Self::count), in elements, of all micro-steps whose gradients are added up, and of this one
    /// alone otherwise. The options' mask is not asked: the sample has its own.
    ///
    /// # Panics
    /// As [`VideoDit::forward`].
    #[track_caller]
    pub fn loss(&self, model: &VideoDit, count: u64, options: &VideoOptions) -> LossShare {
        let options = VideoOptions {
            mask: self.mask,
            ..options.clone()
        };
        let velocity = model.forward(&self.input, &options);
        let own = |tensor: &SpTensor<3>| tensor.clone().shard(Axis::Tp, 1, Split::Contiguous).into_local();
        let (target, weights) = (own(&self.target), own(&self.weights));
        let errors = velocity.tokenwise(|velocity| {
            let errors = velocity.cast(target.dtype()) - target;
            errors.clone() * errors * weights
        });
        LossShare::new(errors, count)
    }
}
