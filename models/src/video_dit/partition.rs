use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::attention::Positions;
use burn_sp::kernels::accumulation;
use burn_sp::layout::{Axis, Layout, Split};
use burn_sp::{SpDevice, SpTensor};

use super::flow::time_of;
use super::{
    FlowSchedule, VideoGrid, VideoInput, VideoKey, VideoObjective, VideoSample, input_patches, output_patches,
};

/// Which samples, frames and tokens of a training batch a rank has; made by [`VideoObjective::partition`].
///
/// Samples are split over `dp`, tokens over `ring` so that attention is equal work, and over `ulysses`. Under teacher
/// forcing a rank has the clean *and* the noisy tokens of the same part of the video.
#[derive(Clone, Debug)]
pub struct VideoPartition {
    objective: VideoObjective,
    schedule: FlowSchedule,
    grid: VideoGrid,
    batch: usize,
    device: SpDevice,
    ring: Split,
    ulysses: Split,
    /// Tokens that this rank has, of the sequence.
    tokens: Positions,
    /// Frames in which these lie.
    frames: Vec<usize>,
    samples: Range<usize>,
}

/// A rank's part of a training batch as it is read: of the partition's [`samples`](VideoPartition::samples), and the
/// latents of its [`frames`](VideoPartition::frames).
#[derive(Clone, Debug)]
pub struct VideoBatch {
    /// Clean latents, `[samples, channels, frames, height, width]`.
    pub latents: Tensor<5>,
    /// States of the text encoder, `[samples, prompts, text tokens, text_dim]`: one prompt for the clip, or one for each
    /// block, which that block's frames alone attend.
    pub texts: Tensor<4>,
    /// How many frames of each sample are there, of *all* samples of the batch: later ones bear no loss. Empty if all are.
    pub valid_frames: Vec<usize>,
}

impl VideoPartition {
    pub(super) fn new(
        objective: VideoObjective,
        schedule: FlowSchedule,
        grid: VideoGrid,
        batch: usize,
        device: &SpDevice,
    ) -> Self {
        let mask = objective.mask();
        let (copies, mesh) = (mask.copies(), device.mesh());
        assert!(
            batch >= mesh.size(Axis::Dp),
            "video partition: a batch of {batch} on {} data-parallel ranks; give each a sample at least",
            mesh.size(Axis::Dp)
        );
        let balanced = || Split::balanced(&mask.over(&grid), copies * grid.tokens(), mesh.size(Axis::Ring));
        let mut partition = Self {
            schedule,
            grid,
            batch,
            device: device.clone(),
            ring: if mesh.size(Axis::Ring) > 1 {
                balanced()
            } else {
                Split::Contiguous
            },
            ulysses: if copies > 1 { Split::Halves } else { Split::Contiguous },
            tokens: Positions::whole(0),
            frames: Vec::new(),
            samples: 0..0,
            objective,
        };
        let layout = partition.layout(1);
        partition.tokens = Positions::new(layout.positions(1, mesh));
        partition.samples = layout.positions(0, mesh).first().cloned().unwrap_or(0..0);
        let of = |range: &Range<usize>| match partition.grid.tokens_per_frame() {
            _ if range.is_empty() => 0..0,
            tokens => range.start / tokens..range.end.div_ceil(tokens),
        };
        let touched = partition.tokens.ranges().iter().flat_map(of);
        let mut frames: Vec<usize> = touched.map(|frame| frame % grid.frames).collect();
        frames.sort_unstable();
        frames.dedup();
        if frames.is_empty() {
            // A rank without tokens takes part all the same.
            frames.push(0);
        }
        partition.frames = frames;
        partition
    }

    /// The samples that this rank has, of the batch.
    pub fn samples(&self) -> Range<usize> {
        self.samples.clone()
    }

    /// The latent frames that this rank needs, ascending: those in which its tokens lie, frame 0 if it has none.
    pub fn frames(&self) -> &[usize] {
        &self.frames
    }

    /// How the video's tokens lie.
    pub fn grid(&self) -> &VideoGrid {
        &self.grid
    }

    /// What this rank needs of a whole batch of latents.
    ///
    /// # Shapes
    /// - `latents`: `[batch, channels, frames, height, width]`; returns those of [`samples`](Self::samples) and
    ///   [`frames`](Self::frames)
    ///
    /// # Panics
    /// If there are fewer samples or frames than the partition was made for.
    pub fn own(&self, latents: Tensor<5>) -> Tensor<5> {
        let device = latents.device();
        let frames: Vec<i64> = self.frames.iter().map(|frame| *frame as i64).collect();
        let latents = latents.narrow(0, self.samples.start, self.samples.len());
        latents.select(2, Tensor::from_data(frames.as_slice(), &device))
    }

    /// The batch at drawn noise levels. The key names them; it is the same on all ranks.
    ///
    /// # Panics
    /// If latents or texts are not of this rank's samples and frames, the patches are not the grid's, or there is neither
    /// one prompt nor one for each block.
    #[track_caller]
    pub fn sample(&self, batch: VideoBatch, key: VideoKey) -> VideoSample {
        let patch = self.check(&batch);
        let states: Vec<Vec<FrameState>> = (0..self.batch)
            .map(|sample| self.states(sample, batch.valid_frames.get(sample).copied(), key))
            .collect();
        let dtype = batch.latents.dtype();
        let (clean, noisy, velocity) = self.noised(batch.latents, &states, key);

        let in_patches = |latents| input_patches(latents, patch);
        let patches = self.in_copies(in_patches(clean), in_patches(noisy));
        let velocity = output_patches(velocity, patch);
        let target = self.in_copies(velocity.zeros_like(), velocity);
        let weights = self.weights(&states, &target.device(), target.dtype());

        let [samples, prompts, tokens, text_dim] = batch.texts.dims();
        let texts = batch.texts.reshape([samples, prompts * tokens, text_dim]);
        let texts = self.with_dropped_texts(texts, key);
        let text_layout = Layout::replicated([self.batch, prompts * tokens, text_dim]);
        let text_layout = text_layout.shard(0, Axis::Dp, Split::Contiguous);

        let bearing = states.iter().flatten().filter(|state| state.weight.is_some()).count();
        let [.., features] = target.dims();
        VideoSample {
            mask: self.objective.mask(),
            input: VideoInput {
                grid: self.grid,
                patches: self.lay(patches.cast(dtype)),
                times: self.times(&states),
                text: SpTensor::from_local(texts, text_layout, &self.device),
                prompts: (prompts > 1).then(|| self.objective.blocks()),
            },
            target: self.lay(target),
            weights: self.lay(weights),
            count: (bearing * self.grid.tokens_per_frame() * features) as u64,
        }
    }

    /// Of this rank's samples and frames, in f32 at least: the clean latents, the noisy ones, and the velocity between.
    fn noised(
        &self,
        latents: Tensor<5>,
        states: &[Vec<FrameState>],
        key: VideoKey,
    ) -> (Tensor<5>, Tensor<5>, Tensor<5>) {
        let [samples, channels, frames, height, width] = latents.dims();
        let wide = accumulation(latents.dtype());
        let device = latents.device();
        let own = self.samples.clone();
        let of_frames = own.flat_map(|sample| self.frames.iter().map(move |frame| states[sample][*frame].level));
        let levels = TensorData::new(of_frames.collect::<Vec<_>>(), [samples, 1, frames, 1, 1]);
        let levels = Tensor::<5>::from_data(levels.convert_dtype(wide), (&device, wide));
        let shape = [channels, height, width];
        let noise = key.latents(self.samples.clone(), &self.frames, shape, wide, &device);
        let clean = latents.cast(wide);
        let noisy = clean.clone() * (1.0 - levels.clone()) + noise.clone() * levels;
        (clean.clone(), noisy, noise - clean)
    }

    /// This rank's tokens of the sequence, of the tokens of its frames: of the copy that is clean, if there is one, and of
    /// the noisy one.
    fn in_copies(&self, clean: Tensor<3>, noisy: Tensor<3>) -> Tensor<3> {
        let last = self.objective.mask().copies() - 1;
        let runs = self.held_tokens().into_iter().map(|(copy, run)| {
            let of = if copy == last { &noisy } else { &clean };
            of.clone().slice_dim(1, run)
        });
        let runs: Vec<_> = runs.collect();
        match runs.is_empty() {
            true => noisy.slice_dim(1, 0..0),
            false => Tensor::cat(runs, 1),
        }
    }

    fn lay(&self, tensor: Tensor<3>) -> SpTensor<3> {
        let [.., features] = tensor.dims();
        SpTensor::from_local(tensor, self.layout(features), &self.device)
    }

    /// Checks what was read; returns the patches' size.
    #[track_caller]
    fn check(&self, batch: &VideoBatch) -> usize {
        let VideoGrid { rows, columns, frames } = self.grid;
        let [samples, _, held, height, width] = batch.latents.dims();
        assert!(
            [samples, held] == [self.samples.len(), self.frames.len()],
            "video batch: latents of {samples} samples and {held} frames; give those of this rank, samples {:?} and frames \
             {:?}",
            self.samples,
            self.frames
        );
        let patch = height / rows.max(1);
        assert!(
            patch > 0 && [height, width] == [rows * patch, columns * patch],
            "video batch: {height} x {width} latents are not {rows} x {columns} square patches"
        );
        let [samples, prompts, _, _] = batch.texts.dims();
        let blocks = self.objective.blocks().count(frames);
        assert!(
            samples == self.samples.len() && (prompts == 1 || prompts == blocks),
            "video batch: {prompts} prompts each of {samples} samples; give 1 or {blocks}, one a block, of {}",
            self.samples.len()
        );
        let valid = batch.valid_frames.len();
        assert!(
            valid == 0 || valid == self.batch,
            "video batch: the valid frames of {valid} samples; give those of all {}, or none",
            self.batch
        );
        patch
    }

    fn layout(&self, features: usize) -> Layout {
        let tokens = self.objective.mask().copies() * self.grid.tokens();
        Layout::replicated([self.batch, tokens, features])
            .shard(0, Axis::Dp, Split::Contiguous)
            .shard(1, Axis::Ring, self.ring.clone())
            .shard(1, Axis::Ulysses, self.ulysses.clone())
    }

    /// The frames of a sample, of all ranks.
    fn states(&self, sample: usize, valid: Option<usize>, key: VideoKey) -> Vec<FrameState> {
        let blocks = self.objective.blocks();
        let state = |frame: usize| {
            if frame == 0 && self.objective.image_to_video {
                return FrameState {
                    level: 0.0,
                    weight: None,
                };
            }
            let index = key.level(sample, blocks.block_of(frame), self.schedule.levels());
            let bears = valid.is_none_or(|valid| frame < valid);
            FrameState {
                level: self.schedule.level(index),
                weight: bears.then(|| self.schedule.weight(index)),
            }
        };
        (0..self.grid.frames).map(state).collect()
    }

    /// The runs of this rank's tokens: which copy of the video they are of, and where they lie in its frames' tokens.
    fn held_tokens(&self) -> Vec<(usize, Range<usize>)> {
        let (video, frame) = (self.grid.tokens(), self.grid.tokens_per_frame());
        let mut runs = Vec::new();
        for range in self.tokens.ranges() {
            let mut next = range.start;
            while next < range.end {
                let (copy, within) = (next / video, next % video);
                let end = range.end.min((copy + 1) * video);
                let held = self.frames.partition_point(|held| *held < within / frame);
                let start = held * frame + within % frame;
                runs.push((copy, start..start + end - next));
                next = end;
            }
        }
        runs
    }

    /// Of all samples and frames of the sequence: clean ones are at time 0.
    fn times(&self, states: &[Vec<FrameState>]) -> TensorData {
        let clean = (self.objective.mask().copies() - 1) * self.grid.frames;
        let of = |states: &Vec<FrameState>| -> Vec<f64> {
            let noisy = states.iter().map(|state| time_of(state.level));
            std::iter::repeat_n(0.0, clean).chain(noisy).collect()
        };
        let times: Vec<f64> = states.iter().flat_map(of).collect();
        TensorData::new(times, [self.batch, clean + self.grid.frames])
    }

    /// Of this rank's tokens.
    fn weights(&self, states: &[Vec<FrameState>], device: &Device, dtype: DType) -> Tensor<3> {
        let clean = (self.objective.mask().copies() - 1) * self.grid.tokens();
        let mut weights = Vec::with_capacity(self.samples.len() * self.tokens.len());
        for states in &states[self.samples.clone()] {
            weights.extend(self.tokens.iter().map(|position| match position.checked_sub(clean) {
                Some(noisy) => states[noisy / self.grid.tokens_per_frame()].weight.unwrap_or(0.0),
                None => 0.0,
            }));
        }
        let data = TensorData::new(weights, [self.samples.len(), self.tokens.len(), 1]);
        Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
    }

    fn with_dropped_texts(&self, texts: Tensor<3>, key: VideoKey) -> Tensor<3> {
        let probability = self.objective.text_dropout;
        if probability == 0.0 {
            return texts;
        }
        let kept = |sample| f64::from(u8::from(!key.drops_text(sample, probability)));
        let kept: Vec<f64> = self.samples.clone().map(kept).collect();
        let data = TensorData::new(kept, [self.samples.len(), 1, 1]).convert_dtype(texts.dtype());
        let kept = Tensor::<3>::from_data(data, (&texts.device(), texts.dtype()));
        texts * kept
    }
}

/// What a frame is at.
struct FrameState {
    /// Its noise level.
    level: f64,
    /// What its squared errors count, if they do.
    weight: Option<f64>,
}
