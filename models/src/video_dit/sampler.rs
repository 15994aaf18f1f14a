use std::ops::Range;

use burn::config::Config;
use burn::tensor::{Tensor, TensorData};
use burn_sp::kernels::accumulation;
use burn_sp::layout::{Axis, Layout, Placement, Split};
use burn_sp::{SpDevice, SpTensor};

use super::flow::time_of;
use super::{
    FlowSchedule, FlowSolver, Solver, VideoCache, VideoDit, VideoGrid, VideoInput, VideoKey, VideoOptions,
    output_patches,
};

/// How a [`VideoDit`] makes videos.
#[derive(Config, Debug, PartialEq)]
pub struct VideoSamplerConfig {
    /// How it goes from noise to clean latents.
    #[config(default = "Solver::UniPc")]
    pub solver: Solver,
    /// In how many steps.
    #[config(default = "20")]
    pub steps: usize,
    /// The shift of the noise levels: see [`FlowSchedule`].
    #[config(default = "5.0")]
    pub shift: f64,
    /// How far it goes from what it would do without the text to what it does with it, and beyond (classifier-free
    /// guidance: Ho and Salimans, arXiv 2207.12598). At 1 the text is simply followed, and the model runs once a step.
    #[config(default = "1.0")]
    pub guidance: f64,
    /// How many frames a block sees, its own and the sink included; all if none is given.
    #[config(default = "None")]
    pub window: Option<usize>,
    /// How many frames at the start stay visible.
    #[config(default = "0")]
    pub sink: usize,
}

impl VideoSamplerConfig {
    /// What cannot work, in one line; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        if self.steps == 0 {
            return Some("0 steps lead nowhere; use at least 1".into());
        }
        if !(self.shift.is_finite() && self.shift > 0.0) {
            return Some(format!("a shift of {}; use one above 0, such as 5", self.shift));
        }
        if !self.guidance.is_finite() {
            return Some(format!("a guidance of {}; use 1, or above", self.guidance));
        }
        let window = self.window.filter(|window| *window <= self.sink)?;
        Some(format!(
            "a window of {window} frames, of which the sink takes {}; use a longer window",
            self.sink
        ))
    }

    /// Starts videos of so many patches a frame, one a sample. The key's seed and step name the noise.
    ///
    /// # Panics
    /// If the configuration has a [`problem`](Self::problem), or there are fewer samples than data-parallel ranks.
    pub fn init(&self, [rows, columns]: [usize; 2], batch: usize, key: VideoKey, device: &SpDevice) -> VideoSampler {
        if let Some(problem) = self.problem() {
            panic!("video sampler: {problem}");
        }
        let replicas = device.mesh().size(Axis::Dp);
        assert!(
            batch >= replicas,
            "video sampler: {batch} samples on {replicas} data-parallel ranks; give each a sample at least"
        );
        VideoSampler {
            config: self.clone(),
            schedule: FlowSchedule::new(self.shift),
            frame: VideoGrid {
                frames: 1,
                rows,
                columns,
            },
            batch,
            key,
            device: device.clone(),
            caches: Vec::new(),
            frames: 0,
        }
    }
}

/// Makes videos block by block, each from noise, seeing the clean ones before it through a [`VideoCache`]. Made by
/// [`VideoSamplerConfig`].
///
/// Tokens of a block are shared out over `ring` and `ulysses` as in training; no rank ever has the whole video. One rank
/// and many make the same videos up to rounding: noise is named by sample and frame.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
/// use burn_sp_models::video_dit::{VideoDitConfig, VideoKey, VideoOptions, VideoSamplerConfig};
///
/// let config = VideoDitConfig::new(4, 24, 48, 2, 1).with_text_dim(8);
/// launch(&LaunchConfig::new(MeshShape::ulysses(2)), &Device::flex(), |device: SpDevice| {
///     let model = device.seeded(1, |device| config.init(device));
///     // One video of 2 x 3 patches a frame.
///     let key = VideoKey { seed: 7, step: 0 };
///     let mut sampler = VideoSamplerConfig::new().with_steps(2).init([2, 3], 1, key, &device);
///     for _ in 0..2 {
///         let text = Tensor::<3>::ones([1, 5, 8], device.device());
///         let block = sampler.next_block(&model, 2, text, &VideoOptions::default());
///         // 2 frames of 6 patches of 2 x 2 latents.
///         assert_eq!(block.global_shape(), [1, 12, 16]);
///         assert_eq!(block.local().dims(), [1, 6, 16]);
///     }
///     assert_eq!(sampler.frames(), 4);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct VideoSampler {
    config: VideoSamplerConfig,
    schedule: FlowSchedule,
    /// Of one frame.
    frame: VideoGrid,
    batch: usize,
    key: VideoKey,
    device: SpDevice,
    /// With the text, and without if there is guidance.
    caches: Vec<VideoCache>,
    /// Clean frames.
    frames: usize,
}

impl VideoSampler {
    /// Latent frames that there are.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// The bytes of keys and values that this rank keeps.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(VideoCache::bytes).sum()
    }

    /// Goes on with frames that are given: an image, or the start of a video. A block at a time, as the model has learnt
    /// them.
    ///
    /// # Shapes
    /// - `latents`: `[batch, channels, frames, height, width]`, whole on every rank
    /// - `text`: `[batch, text tokens, text_dim]`, whole on every rank
    ///
    /// # Panics
    /// If they do not fit into the cache's window, or as [`VideoDit::forward_cached`].
    #[track_caller]
    pub fn give(&mut self, model: &VideoDit, latents: Tensor<5>, text: Tensor<3>, options: &VideoOptions) {
        let frames = latents.dims()[2];
        let block = VideoGrid { frames, ..self.frame };
        let own = latents.slice_dim(0, self.samples()).cast(accumulation(text.dtype()));
        let x = self.lay(output_patches(own, model.patch_size));
        self.take_up(model, x, block, text, options);
    }

    /// The next frames, clean.
    ///
    /// # Shapes
    /// - `text`: `[batch, text tokens, text_dim]`, whole on every rank: the block's prompt
    /// - returns `[batch, tokens, patch * patch * channels]`, [patches](super::from_output_patches) of latents in f32 at
    ///   least, samples over `dp` and tokens over `ring` and `ulysses`
    ///
    /// # Panics
    /// As [`give`](Self::give).
    #[track_caller]
    pub fn next_block(
        &mut self,
        model: &VideoDit,
        frames: usize,
        text: Tensor<3>,
        options: &VideoOptions,
    ) -> SpTensor<3> {
        let block = VideoGrid { frames, ..self.frame };
        let mut x = self.noise(model, &block, &text);
        let mut solver = FlowSolver::new(self.config.solver, self.schedule.steps(self.config.steps));
        while let Some(level) = solver.level() {
            let velocity = self.velocity(model, x.clone(), block, level, &text, options);
            x = x.tokenwise(|x| solver.step(x, velocity.into_local()));
        }
        self.take_up(model, x.clone(), block, text, options);
        x
    }

    /// Runs the model on clean frames, so that the caches have them.
    #[track_caller]
    fn take_up(&mut self, model: &VideoDit, x: SpTensor<3>, block: VideoGrid, text: Tensor<3>, options: &VideoOptions) {
        self.velocity(model, x, block, 0.0, &text, options);
        self.frames += block.frames;
    }

    /// The velocity of the block that comes next, at a noise level.
    #[track_caller]
    fn velocity(
        &mut self,
        model: &VideoDit,
        x: SpTensor<3>,
        block: VideoGrid,
        level: f64,
        text: &Tensor<3>,
        options: &VideoOptions,
    ) -> SpTensor<3> {
        let guided = self.config.guidance != 1.0;
        if self.caches.is_empty() {
            let cache = VideoCache::new(model.blocks.len(), self.config.window, self.config.sink);
            self.caches = vec![cache; if guided { 2 } else { 1 }];
        }
        let (dtype, wide) = (text.dtype(), accumulation(text.dtype()));
        let x = x.tokenwise(|x| as_input(x, model.patch_size).cast(dtype));
        let times = vec![time_of(level); self.batch * block.frames];
        let samples = Layout::replicated(text.dims()).shard(0, Axis::Dp, Split::Contiguous);
        let mut run = |cache: usize, text: Tensor<3>| {
            let input = VideoInput {
                grid: block,
                patches: x.clone(),
                times: TensorData::new(times.clone(), [self.batch, block.frames]),
                text: self.device.distribute(text, &samples),
                prompts: None,
            };
            let velocity = model.forward_cached(&input, self.frames, &mut self.caches[cache], options);
            let velocity = velocity.redistribute(Axis::Tp, Placement::Replicate);
            velocity.tokenwise(|velocity| velocity.cast(wide))
        };
        let with = run(0, text.clone());
        if !guided {
            return with;
        }
        let without = run(1, text.zeros_like()).into_local();
        let guidance = self.config.guidance;
        with.tokenwise(|with| without.clone() + (with - without) * guidance)
    }

    /// In f32 at least: steps are small differences.
    fn noise(&self, model: &VideoDit, block: &VideoGrid, text: &Tensor<3>) -> SpTensor<3> {
        let (channels, patch) = (model.channels, model.patch_size);
        let shape = [channels, block.rows * patch, block.columns * patch];
        let frames: Vec<usize> = (self.frames..self.frames + block.frames).collect();
        let noise = self.key.latents(
            self.samples(),
            &frames,
            shape,
            accumulation(text.dtype()),
            &text.device(),
        );
        self.lay(output_patches(noise, patch))
    }

    /// This rank's samples.
    fn samples(&self) -> Range<usize> {
        let mesh = self.device.mesh();
        let parts = Split::Contiguous.parts(self.batch, mesh.size(Axis::Dp));
        parts.of(mesh.coordinate(Axis::Dp))[0].clone()
    }

    /// Shares out the tokens of this rank's samples: contiguously, as all of them see all.
    fn lay(&self, patches: Tensor<3>) -> SpTensor<3> {
        let mut shape = patches.dims();
        shape[0] = self.batch;
        let layout = Layout::replicated(shape).shard(0, Axis::Dp, Split::Contiguous);
        SpTensor::from_local(patches, layout, &self.device)
            .shard(Axis::Ring, 1, Split::Contiguous)
            .shard(Axis::Ulysses, 1, Split::Contiguous)
    }
}

/// What the model writes as it reads it: of each token the channels first, then rows and columns.
fn as_input(patches: Tensor<3>, patch: usize) -> Tensor<3> {
    let [batch, tokens, features] = patches.dims();
    if tokens == 0 {
        // To Burn a length of 0 means "as it was".
        return patches;
    }
    let channels = features / (patch * patch);
    let apart = patches.reshape([batch * tokens, patch, patch, channels]);
    apart.permute([0, 3, 1, 2]).reshape([batch, tokens, features])
}
