use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_sp::attention::{AttentionOptions, KvMove, Positions};
use burn_sp::layout::{Axis, Split};
use burn_sp::train::{ParamLayouts, ParamShards};
use burn_sp::{SpDevice, SpTensor};

use super::block::modulated;
use super::prompts::text_mask;
use super::{
    FrameRuns, TextEmbedding, TimeEmbedding, VideoBlock, VideoCache, VideoContext, VideoGrid, VideoInput, VideoMask,
    VideoRotary,
};
use crate::transformer::MemoryOptions;

/// What a forward pass depends on beside its input.
#[derive(Clone, Debug, Default)]
pub struct VideoOptions {
    /// Who sees whom.
    pub mask: VideoMask,
    /// How the ring axis moves keys and values.
    pub kv: KvMove,
    /// How it needs less memory.
    pub memory: MemoryOptions,
}

/// The velocity of each token, from the residual stream.
#[derive(Module, Debug)]
pub struct VideoHead {
    /// Added to the embedding of each frame's time, `[1, 2, hidden]`: shift and scale.
    pub modulation: Param<Tensor<3>>,
    /// `hidden -> patch * patch * channels`.
    pub output: Linear,
    /// Added under the norm's root.
    pub epsilon: f64,
}

impl VideoHead {
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`; `time`: `[batch, frames, hidden]`, frames those of [`FrameRuns::frames`]
    /// - returns `[batch, tokens, patch * patch * channels]`
    pub fn forward(&self, x: Tensor<3>, time: Tensor<3>, frames: &FrameRuns) -> Tensor<3> {
        let time: Tensor<4> = time.unsqueeze_dim(2);
        let vectors = time + self.modulation.val().unsqueeze_dim(1);
        self.output.forward(modulated(x, &vectors, 0, self.epsilon, frames))
    }
}

/// A video diffusion transformer that predicts velocities, noise minus clean latents; made by
/// [`VideoDitConfig`](super::VideoDitConfig).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_sp::prelude::*;
/// use burn_sp_models::video_dit::{FrameBlocks, VideoDitConfig, VideoGrid, VideoInput, VideoMask, VideoOptions};
///
/// // 5 frames of 2 x 3 patches, denoised in blocks of 2 frames.
/// let grid = VideoGrid { frames: 5, rows: 2, columns: 3 };
/// let options = VideoOptions {
///     mask: VideoMask::block_causal(FrameBlocks::new(2)),
///     ..VideoOptions::default()
/// };
/// let config = VideoDitConfig::new(4, 24, 48, 2, 1).with_text_dim(8);
/// let ranks = LaunchConfig::new(MeshShape::ulysses(2));
/// launch(&ranks, &Device::flex().autodiff(), |device: SpDevice| {
///     let model = device.seeded(1, |device| config.init(device));
///     let latents = Tensor::<5>::ones([1, 4, 5, 4, 6], device.device());
///     let times = TensorData::new(vec![900.0, 900.0, 400.0, 400.0, 0.0], [1, 5]);
///     let text = Tensor::<3>::ones([1, 7, 8], device.device());
///     let input = VideoInput::partition(grid, latents, times, text, &device);
///     // 15 of 30 tokens: two frames and a half.
///     assert_eq!(model.forward(&input, &options).local().dims(), [1, 15, 16]);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct VideoDit {
    /// Of patches, `channels * patch * patch -> hidden`.
    pub patch: Linear,
    /// Of times.
    pub time: TimeEmbedding,
    /// Of texts.
    pub text: TextEmbedding,
    /// The blocks.
    pub blocks: Vec<VideoBlock>,
    /// Output layer.
    pub head: VideoHead,
    /// Latents of a patch from top to bottom, and from left to right.
    pub patch_size: usize,
    /// Channels of the latents.
    pub channels: usize,
}

impl VideoDit {
    /// This rank's part of the model on a mesh with a [`tp`](Axis::Tp) axis: its heads and hidden units. Every rank calls
    /// it on the same whole model, so that a model is the same on every mesh. With one rank on the axis nothing changes.
    ///
    /// The layouts say which parameters are sharded, and how.
    ///
    /// # Panics
    /// If it has been sharded already.
    pub fn shard(self, device: &SpDevice) -> (Self, ParamLayouts) {
        let mut layouts = ParamLayouts::replicated();
        let blocks = self.blocks.into_iter();
        let model = Self {
            blocks: blocks.map(|block| block.shard(device, &mut layouts)).collect(),
            ..self
        };
        (model, layouts)
    }

    /// The velocity of every token, [patches](super::output_patches) of the latents' velocity.
    ///
    /// # Shapes
    /// - returns `[batch, tokens, patch * patch * channels]` in the layout of the input's patches, tokens sharded over
    ///   [`Axis::Tp`] too
    ///
    /// # Panics
    /// If the input is not of as many tokens, frames and samples as its grid and the mask say.
    #[track_caller]
    pub fn forward(&self, input: &VideoInput, options: &VideoOptions) -> SpTensor<3> {
        check(input, &options.mask);
        let x = own_tokens(input);
        let context = self.context(input, &x, 0, options);
        let (shards, memory) = (&options.memory.shards, &options.memory);
        self.through(x, input, context, shards, |_, block, x, vectors, text, context| {
            block.forward(x, vectors, text, context, memory)
        })
    }

    /// The velocity of the tokens of a block of frames, which see one another and the frames that a cache has: for
    /// sampling, block after block. The cache takes up the block; the same block once more takes its own place, as it does
    /// from step to step, and in the end when it is clean.
    ///
    /// The input's grid and times are of the block's frames. The options' mask is not asked, nor is anything computed
    /// again: there is no backward.
    ///
    /// # Shapes
    /// - returns what [`forward`](Self::forward) does
    ///
    /// # Panics
    /// If the block is not the next one or the last, or has no place in the cache's window.
    #[track_caller]
    pub fn forward_cached(
        &self,
        input: &VideoInput,
        first_frame: usize,
        cache: &mut VideoCache,
        options: &VideoOptions,
    ) -> SpTensor<3> {
        check(input, &VideoMask::Full);
        assert!(
            input.prompts.is_none(),
            "video dit: a cached block has one prompt; give it that of the block, and no prompts of blocks"
        );
        cache.expect(first_frame, &input.grid);
        let seen = VideoOptions {
            mask: VideoMask::Full,
            ..options.clone()
        };
        let x = own_tokens(input);
        let context = self.context(input, &x, first_frame, &seen);
        let layers = cache.layers();
        assert!(
            layers.len() == self.blocks.len(),
            "video dit: a cache of {} blocks for a model of {}",
            layers.len(),
            self.blocks.len()
        );
        let shards = &options.memory.shards;
        self.through(x, input, context, shards, |index, block, x, vectors, text, context| {
            let block = shards.gather(block);
            block.forward_cached(x, vectors, text, context, &mut layers[index])
        })
    }

    /// What all blocks depend on, of the tokens `x`: frames count through the video from the input's first one.
    fn context(&self, input: &VideoInput, x: &SpTensor<3>, first_frame: usize, options: &VideoOptions) -> VideoContext {
        let grid = &input.grid;
        // Those of attention, where no token is sharded over tp.
        let before = first_frame * grid.tokens_per_frame();
        let positions = input.patches.positions(1);
        let ranges = positions.ranges().iter();
        let positions = Positions::new(ranges.map(|range| before + range.start..before + range.end));
        let video = VideoGrid {
            frames: first_frame + grid.frames,
            ..*grid
        };
        let head_dim = self.blocks.first().map_or(0, |block| block.attention.head_dim);
        let (dtype, device) = (x.local().dtype(), x.local().device());
        VideoContext {
            frames: FrameRuns::new(&x.positions(1), grid.tokens_per_frame()),
            rotary: VideoRotary::new(&video, &positions, head_dim, dtype, &device),
            attention: AttentionOptions {
                mask: options.mask.over(grid),
                kv: options.kv,
                ..AttentionOptions::default()
            },
            text: text_mask(input.prompts, grid, input.text.global_shape()[1]),
        }
    }

    /// From patches to velocities, through blocks that run as given.
    fn through(
        &self,
        x: SpTensor<3>,
        input: &VideoInput,
        context: VideoContext,
        shards: &ParamShards,
        mut run: impl FnMut(usize, &VideoBlock, SpTensor<3>, Tensor<4>, SpTensor<3>, &VideoContext) -> SpTensor<3>,
    ) -> SpTensor<3> {
        let (time, vectors) = shards
            .gather(&self.time)
            .forward(&input.times_at(context.frames.frames()));
        let text = shards.gather(&self.text);
        let text = input.text.clone().tokenwise(|states| text.forward(states));
        let patch = shards.gather(&self.patch);
        let mut x = x.tokenwise(|x| patch.forward(x));
        for (index, block) in self.blocks.iter().enumerate() {
            let _span = tracing::trace_span!("block", number = index).entered();
            x = run(index, block, x, vectors.clone(), text.clone(), &context);
        }
        let head = shards.gather(&self.head);
        x.tokenwise(|x| head.forward(x, time, &context.frames))
    }
}

/// The patches of this rank's tokens, which `tp` shares out too.
fn own_tokens(input: &VideoInput) -> SpTensor<3> {
    input.patches.clone().shard(Axis::Tp, 1, Split::Contiguous)
}

#[track_caller]
fn check(input: &VideoInput, mask: &VideoMask) {
    let grid = &input.grid;
    let (patches, copies) = (input.patches.global_shape(), mask.copies());
    assert!(
        patches[1] == copies * grid.tokens(),
        "video dit: {} tokens, but {mask:?} wants {copies} times the {} of {grid:?}",
        patches[1],
        grid.tokens()
    );
    let (found, times) = (input.times.shape().to_vec(), [patches[0], copies * grid.frames]);
    assert!(
        found == times,
        "video dit: the times are {found:?}, but the sequence has [samples, frames] {times:?}"
    );
    assert!(
        input.text.global_shape()[0] == patches[0],
        "video dit: {} texts for {} samples",
        input.text.global_shape()[0],
        patches[0]
    );
}
