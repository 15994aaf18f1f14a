use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn_sp::layout::{AttentionWorkload, Links, MeshShape};
use burn_sp_models::vae::VaeConfig;
use burn_sp_models::video_dit::{Forcing, FrameBlocks, VideoDitConfig, VideoGrid, VideoObjective, VideoSamplerConfig};
use indicatif::HumanCount;
use serde::{Deserialize, Serialize};

use super::flags::{ForcingFlag, SolverFlag, VideoModelFlags, VideoTrainFlags};
use crate::InputError;
use crate::config::{LearningConfig, MAX_TOKENS, RunConfig, StateConfig, at_least_one, refuse};
use crate::flags::RunFlags;

/// Elements are f32.
const ELEMENT_BYTES: usize = 4;

/// Channels of a pixel.
const PIXEL_CHANNELS: usize = 3;

/// Of any size: no product of a few overflows.
const MAX_SIZE: usize = 1 << 20;

/// The value of a flag that is a size.
fn size(flag: &str, value: Option<usize>, default: usize) -> Result<usize, InputError> {
    match at_least_one(flag, value, default)? {
        size if size > MAX_SIZE => refuse(format!("{flag} {size}: use at most {MAX_SIZE}")),
        size => Ok(size),
    }
}

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
    /// That of the VAE's folder.
    #[serde(skip)]
    pub vae_config: Option<VaeConfig>,
    pub forcing: ForcingFlag,
    pub block: usize,
    pub image_to_video: bool,
    pub window: Option<usize>,
    pub sink: usize,
    pub shift: f64,
    pub text_dropout: f64,
    #[serde(flatten)]
    pub learning: LearningConfig,
    /// No part of what a report says of a run: one that is run again starts anew.
    #[serde(skip)]
    pub state: StateConfig,
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
        let hidden = size("--hidden", hidden, 128)?;
        let height = size("--height", self.height, 32)?;
        let frames = size("--frames", self.frames, 8)?;
        let dp = self.run.dp.unwrap_or(1);
        let config = VideoTrainConfig {
            // Until the mesh can be chosen.
            run: RunFlags::default().with_mesh(MeshShape::default()).resolve(|_| None)?,
            video: self.video.clone(),
            frames,
            height,
            width: size("--width", self.width, height)?,
            vae: self.vae.clone(),
            vae_config: self.vae.as_deref().map(read_vae_config).transpose()?,
            forcing: self.forcing.unwrap_or_default(),
            block: size("--block", self.block, 2)?,
            image_to_video: self.image_to_video.unwrap_or(false),
            window: self.window.map(|window| window.min(MAX_SIZE)),
            sink: match self.sink {
                Some(sink) if sink > 0 && self.window.is_none() => {
                    return refuse(format!(
                        "--sink {sink}: without a window all frames stay visible; give --window, or leave it out"
                    ));
                }
                sink => sink.unwrap_or(0).min(MAX_SIZE),
            },
            shift: self.shift.unwrap_or(5.0),
            text_dropout: self.text_dropout.unwrap_or(0.0),
            learning: self.learning.resolve(1e-3)?,
            state: self.state.resolve(self.run.silent)?,
            sample: self.sample.clone(),
            sample_every: match self.sample_every {
                Some(0) => return refuse("--sample-every 0: use at least 1, or leave it out for after the last step"),
                every => every,
            },
            samples: size("--samples", self.samples, dp.max(2))?,
            sample_frames: size("--sample-frames", self.sample_frames, frames)?,
            sample_steps: size("--sample-steps", self.sample_steps, 20)?,
            solver: self.solver.unwrap_or_default(),
            guidance: self.guidance.unwrap_or(1.0),
            fps: size("--fps", self.fps, 8)?,
            hidden,
            layers: size("--layers", layers, 4)?,
            heads: size("--heads", heads, 4)?,
            ffn: size("--ffn", ffn, 4 * hidden)?,
            patch: size("--patch", patch, if self.vae.is_some() { 2 } else { 4 })?,
            text_tokens: size("--text-tokens", text_tokens, 16)?,
            text_dim: size("--text-dim", text_dim, 64)?,
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
        let sequence = match self.run.mesh()? {
            Some(mesh) => mesh.with_dp(1),
            None => MeshShape::ulysses(self.run.ranks.unwrap_or(2)),
        };
        if !sequence.fits(tokens) {
            return refuse(format!(
                "{} ranks share {tokens} tokens ({sequence}): a rank would have none; use fewer ranks, more --frames or a \
                 smaller --patch",
                sequence.ranks()
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

fn read_vae_config(folder: &Path) -> Result<VaeConfig, InputError> {
    let file = folder.join("config.json");
    let wrong = |error: &dyn Display| {
        InputError(format!(
            "--vae {}: {error}; name a folder with config.json and safetensors files of diffusers' AutoencoderKLWan",
            file.display()
        ))
    };
    let json = std::fs::read_to_string(&file).map_err(|error| wrong(&error))?;
    let config = VaeConfig::from_diffusers(&json).map_err(|error| wrong(&error))?;
    match config.pixel_channels {
        PIXEL_CHANNELS => Ok(config),
        channels => Err(wrong(&format!(
            "its pixels have {channels} channels; videos have {PIXEL_CHANNELS}"
        ))),
    }
}

impl VideoTrainConfig {
    /// Checks what the mesh does not matter for; returns the tokens of a sequence.
    fn check(&self) -> Result<usize, InputError> {
        let square = self.patch * self.latents().1;
        let of = match &self.vae {
            Some(_) => "the VAE's stride times --patch",
            None => "--patch",
        };
        for (flag, pixels) in [("--height", self.height), ("--width", self.width)] {
            if !pixels.is_multiple_of(square) {
                return refuse(format!(
                    "{flag} {pixels}: tokens are squares of {square} pixels ({of}); use {flag} {}",
                    pixels.next_multiple_of(square)
                ));
            }
        }
        if self.image_to_video && self.frames == 1 {
            return refuse(
                "--image-to-video --frames 1: the only frame is given, so nothing is left to learn; use --frames 2",
            );
        }
        if !self.hidden.is_multiple_of(2 * self.heads) {
            return refuse(format!(
                "--hidden {} --heads {}: a head must have an even number of elements; use --hidden {}",
                self.hidden,
                self.heads,
                self.hidden.next_multiple_of(2 * self.heads)
            ));
        }
        if !(self.shift.is_finite() && self.shift > 0.0) {
            return refuse(format!("--shift {}: use one above 0, such as 5", self.shift));
        }
        if !(0.0..=1.0).contains(&self.text_dropout) {
            return refuse(format!("--text-dropout {}: use 0 to 1", self.text_dropout));
        }
        if !self.guidance.is_finite() {
            return refuse(format!("--guidance {}: use 1, or above", self.guidance));
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
        // What no flag above is to blame for.
        let problems = [
            ("model", self.model().problem()),
            ("objective", self.objective().problem()),
            ("samples", self.sampler().problem()),
        ];
        for (what, problem) in problems {
            if let Some(problem) = problem {
                return refuse(format!("{what}: {problem}"));
            }
        }
        let [sheet, folder] = [
            self.sample.as_deref(),
            self.sample.as_deref().and_then(|path| path.parent()),
        ];
        if let Some(file) = sheet.filter(|path| path.exists() && !path.is_dir()) {
            return refuse(format!("--sample {}: that is a file; name a folder", file.display()));
        }
        if let Some(folder) = folder.filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
            return refuse(format!("--sample: {} is no folder; make it first", folder.display()));
        }
        let tokens = self.objective().mask().copies() * self.grid().tokens();
        if tokens > MAX_TOKENS {
            return refuse(format!(
                "--frames {} --height {} --width {}: {} tokens; {} at most work, so use fewer frames or a larger --patch",
                self.frames,
                self.height,
                self.width,
                HumanCount(tokens as u64),
                HumanCount(MAX_TOKENS as u64)
            ));
        }
        Ok(tokens)
    }

    /// Channels of the latents, and how many pixels are one of them from top to bottom.
    pub fn latents(&self) -> (usize, usize) {
        match &self.vae_config {
            Some(vae) => (vae.latent_channels, vae.spatial_stride()),
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
        match &self.vae_config {
            Some(vae) => 1 + vae.temporal_stride() * (latents - 1),
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
