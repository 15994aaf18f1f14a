use std::path::PathBuf;

use burn_sp::layout::{AttentionWorkload, Links, MeshShape};
use burn_sp_models::vae::VaeConfig;
use burn_sp_models::video_dit::{Forcing, FrameBlocks, VideoDitConfig, VideoGrid, VideoObjective, VideoSamplerConfig};
use serde::{Deserialize, Serialize};

use super::flags::{ForcingFlag, SolverFlag, VaeShape, VideoModelFlags, VideoTrainFlags};
use crate::InputError;
use crate::config::{LearningConfig, RunConfig, at_least_one, refuse};
use crate::flags::RunFlags;

/// Elements are f32.
const ELEMENT_BYTES: usize = 4;

/// Channels of a pixel.
const PIXEL_CHANNELS: usize = 3;

/// A training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // They are documented where they are flags.
pub struct VideoTrainConfig {
    #[serde(flatten)]
    pub run: RunConfig,
    /// Files and folders; none: the rendered scene.
    pub video: Option<Vec<PathBuf>>,
    pub frames: usize,
    pub height: usize,
    pub width: usize,
    pub vae: Option<PathBuf>,
    pub vae_shape: VaeShape,
    pub forcing: ForcingFlag,
    pub block: usize,
    pub image_to_video: bool,
    pub window: Option<usize>,
    pub sink: usize,
    pub shift: f64,
    pub text_dropout: f64,
    #[serde(flatten)]
    pub learning: LearningConfig,
    pub sample: Option<PathBuf>,
    pub sample_every: Option<usize>,
    pub samples: usize,
    pub sample_frames: usize,
    pub sample_steps: usize,
    pub solver: SolverFlag,
    pub guidance: f64,
    pub fps: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub ffn: usize,
    pub patch: usize,
    pub text_tokens: usize,
    pub text_dim: usize,
    pub weights: Option<Vec<PathBuf>>,
}

impl VideoTrainFlags {
    /// Completes the flags and checks them, all but the videos and weights themselves.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self) -> Result<VideoTrainConfig, InputError> {
        let VideoModelFlags {
            hidden,
            layers,
            heads,
            ffn,
            patch,
            text_tokens,
            text_dim,
            ref weights,
        } = self.model;
        let hidden = at_least_one("--hidden", hidden, 128)?;
        let height = at_least_one("--height", self.height, 32)?;
        let frames = at_least_one("--frames", self.frames, 8)?;
        let dp = self.run.dp.unwrap_or(1);
        let config = VideoTrainConfig {
            // Until the mesh can be chosen.
            run: RunFlags::default().with_mesh(MeshShape::default()).resolve(|_| None)?,
            video: self.video.clone(),
            frames,
            height,
            width: at_least_one("--width", self.width, height)?,
            vae: self.vae.clone(),
            vae_shape: self.vae_shape.unwrap_or_default(),
            forcing: self.forcing.unwrap_or_default(),
            block: at_least_one("--block", self.block, 2)?,
            image_to_video: self.image_to_video.unwrap_or(false),
            window: self.window,
            sink: self.sink.unwrap_or(0),
            shift: self.shift.unwrap_or(5.0),
            text_dropout: self.text_dropout.unwrap_or(0.0),
            learning: self.learning.resolve(1e-3)?,
            sample: self.sample.clone(),
            sample_every: match self.sample_every {
                Some(0) => return refuse("--sample-every 0: use at least 1, or leave it out for after the last step"),
                every => every,
            },
            samples: at_least_one("--samples", self.samples, dp.max(2))?,
            sample_frames: at_least_one("--sample-frames", self.sample_frames, frames)?,
            sample_steps: at_least_one("--sample-steps", self.sample_steps, 20)?,
            solver: self.solver.unwrap_or_default(),
            guidance: self.guidance.unwrap_or(1.0),
            fps: at_least_one("--fps", self.fps, 8)?,
            hidden,
            layers: at_least_one("--layers", layers, 4)?,
            heads: at_least_one("--heads", heads, 4)?,
            ffn: at_least_one("--ffn", ffn, 4 * hidden)?,
            patch: at_least_one("--patch", patch, if self.vae.is_some() { 2 } else { 4 })?,
            text_tokens: at_least_one("--text-tokens", text_tokens, 16)?,
            text_dim: at_least_one("--text-dim", text_dim, 64)?,
            weights: weights.clone(),
        };
        let tokens = config.check()?;
        let mask = config.objective().mask().over(&config.grid());
        let run = RunFlags {
            seq_len: Some(tokens),
            batch: self.run.batch.or(Some(dp.max(1))),
            ..self.run.clone()
        };
        if let Some(given) = self.run.seq_len.filter(|given| *given != tokens) {
            return refuse(format!(
                "--seq-len {given}: what is trained on has {tokens} tokens, by --frames, --height, --width, --patch and \
                 --forcing; leave it out"
            ));
        }
        let run = run.resolve(|run| {
            let workload = AttentionWorkload {
                batch: run.batch.saturating_mul(run.accumulate),
                tokens,
                heads: config.heads,
                kv_heads: config.heads,
                head_dim: hidden / config.heads,
                element_bytes: ELEMENT_BYTES,
                mask,
            };
            MeshShape::choose(run.ranks, &workload, &Links::threads())
        })?;
        if config.sample.is_some() && config.samples < run.dp {
            return refuse(format!(
                "--samples {} --dp {}: a rank would have no sample; use --samples {}",
                config.samples, run.dp, run.dp
            ));
        }
        Ok(VideoTrainConfig { run, ..config })
    }
}

impl VideoTrainConfig {
    /// Checks what the mesh does not matter for; returns the tokens of a sequence.
    fn check(&self) -> Result<usize, InputError> {
        let [square, what] = match &self.vae {
            Some(_) => [self.patch * self.vae_config().spatial_stride(), 1],
            None => [self.patch, 0],
        };
        for (flag, pixels) in [("--height", self.height), ("--width", self.width)] {
            if !pixels.is_multiple_of(square) {
                let of = ["--patch", "the VAE's stride times --patch"][what];
                return refuse(format!(
                    "{flag} {pixels}: tokens are squares of {square} pixels ({of}); use {flag} {}",
                    pixels.next_multiple_of(square)
                ));
            }
        }
        if self.window.is_some_and(|window| window < self.sink + self.block) {
            return refuse(format!(
                "--window {} --sink {} --block {}: a block and the sink do not fit into the window; use --window {}",
                self.window.unwrap_or(0),
                self.sink,
                self.block,
                self.sink + self.block
            ));
        }
        if let Some(problem) = self.model().problem() {
            return refuse(format!("model: {problem}"));
        }
        if let Some(problem) = self.objective().problem() {
            return refuse(format!("objective: {problem}"));
        }
        if let Some(problem) = self.sampler().problem() {
            return refuse(format!("samples: {problem}"));
        }
        let [sheet, folder] = [
            self.sample.as_deref(),
            self.sample.as_deref().and_then(|path| path.parent()),
        ];
        if let Some(file) = sheet.filter(|path| path.is_file()) {
            return refuse(format!("--sample {}: that is a file; name a folder", file.display()));
        }
        if let Some(folder) = folder.filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
            return refuse(format!("--sample: {} is no folder; make it first", folder.display()));
        }
        Ok(self.objective().mask().copies() * self.grid().tokens())
    }

    /// The VAE, if there is one.
    pub fn vae_config(&self) -> VaeConfig {
        match self.vae_shape {
            VaeShape::Wan21 => VaeConfig::wan21(),
            VaeShape::Wan22 => VaeConfig::wan22(),
        }
    }

    /// Channels of the latents, and how many pixels are one of them from top to bottom.
    pub fn latents(&self) -> (usize, usize) {
        match &self.vae {
            Some(_) => (self.vae_config().latent_channels, self.vae_config().spatial_stride()),
            None => (PIXEL_CHANNELS, 1),
        }
    }

    /// How the tokens of a clip lie.
    pub fn grid(&self) -> VideoGrid {
        let (_, stride) = self.latents();
        VideoGrid {
            frames: self.frames,
            rows: self.height / stride / self.patch,
            columns: self.width / stride / self.patch,
        }
    }

    /// Frames of the video that so many latent frames are.
    pub fn video_frames(&self, latents: usize) -> usize {
        match &self.vae {
            Some(_) => 1 + self.vae_config().temporal_stride() * (latents - 1),
            None => latents,
        }
    }

    /// The model.
    pub fn model(&self) -> VideoDitConfig {
        VideoDitConfig {
            text_dim: self.text_dim,
            patch_size: self.patch,
            ..VideoDitConfig::new(self.latents().0, self.hidden, self.ffn, self.heads, self.layers)
        }
    }

    /// What it learns.
    pub fn objective(&self) -> VideoObjective {
        let forcing = Forcing::from(self.forcing);
        VideoObjective::new(FrameBlocks::new(self.block))
            .with_forcing(forcing)
            .with_image_to_video(self.image_to_video)
            // Beside the sink; teacher forcing sees all clean frames.
            .with_window(
                self.window
                    .filter(|_| forcing == Forcing::Diffusion)
                    .map(|window| window - self.sink),
            )
            .with_sink(self.sink)
            .with_shift(self.shift)
            .with_text_dropout(self.text_dropout)
    }

    /// How samples are made.
    pub fn sampler(&self) -> VideoSamplerConfig {
        VideoSamplerConfig::new()
            .with_solver(self.solver.into())
            .with_steps(self.sample_steps)
            .with_shift(self.shift)
            .with_guidance(self.guidance)
            .with_window(self.window)
            .with_sink(self.sink)
    }
}
