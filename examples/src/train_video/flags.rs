use std::path::PathBuf;

use burn_sp_models::video_dit::{Forcing, Solver};
use clap::{Args, Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::flags::{LearningFlags, RunFlags, StateFlags};

const VIDEO: &str = "Video";

const OBJECTIVE: &str = "Objective";

const SAMPLES: &str = "Samples";

/// Names of [`Forcing`] on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ForcingFlag {
    /// Blocks see clean frames before them; the sequence is twice as long.
    #[default]
    Teacher,
    /// Blocks see noisy frames before them.
    Diffusion,
}

impl From<ForcingFlag> for Forcing {
    fn from(flag: ForcingFlag) -> Self {
        match flag {
            ForcingFlag::Teacher => Forcing::Teacher,
            ForcingFlag::Diffusion => Forcing::Diffusion,
        }
    }
}

/// Names of [`Solver`] on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SolverFlag {
    /// Of first order.
    Euler,
    /// Of second order.
    #[default]
    Unipc,
}

impl From<SolverFlag> for Solver {
    fn from(flag: SolverFlag) -> Self {
        match flag {
            SolverFlag::Euler => Solver::Euler,
            SolverFlag::Unipc => Solver::UniPc,
        }
    }
}

/// The size of the model.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[command(next_help_heading = "Model")]
pub struct VideoModelFlags {
    /// Width [default: 128]
    #[arg(long, value_name = "N")]
    pub hidden: Option<usize>,

    /// Blocks [default: 4]
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,

    /// Heads [default: 4]
    #[arg(long, value_name = "N")]
    pub heads: Option<usize>,

    /// Hidden units of the MLP [default: 4 times the width]
    #[arg(long, value_name = "N")]
    pub ffn: Option<usize>,

    /// Pixels, or latents with --vae, of a token from top to bottom and from left to right [default: 4, with --vae 2]
    #[arg(long, value_name = "N")]
    pub patch: Option<usize>,

    /// Tokens of a caption; longer ones are cut [default: 16]
    #[arg(long, value_name = "N")]
    pub text_tokens: Option<usize>,

    /// Width of a caption's vectors [default: 64]
    #[arg(long, value_name = "N")]
    pub text_dim: Option<usize>,

    /// Start from the weights in these safetensors files, under diffusers' or Wan's names
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub weights: Option<Vec<PathBuf>>,
}

/// Trains a causal video transformer on clips, their frames split over ranks.
///
/// With no flags: 2 ranks, a small model, and a scene that is rendered for it, a ball that bounces.
#[derive(Parser, Clone, Debug, Default, Serialize, Deserialize)]
#[command(name = "train-video-dit", version, args_override_self = true)]
pub struct VideoTrainFlags {
    /// The run.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunFlags,

    /// Videos (Y4M; others through ffmpeg), folders of numbered PNG or JPEG frames, or folders of either; captions beside
    /// them [default: the rendered scene]
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = VIDEO)]
    pub video: Option<Vec<PathBuf>>,

    /// Latent frames of a training clip; without --vae, as many frames of the video [default: 8]
    #[arg(long, value_name = "N", help_heading = VIDEO)]
    pub frames: Option<usize>,

    /// Height in pixels, to which videos are scaled [default: 32]
    #[arg(long, value_name = "N", help_heading = VIDEO)]
    pub height: Option<usize>,

    /// Width in pixels; what is too wide is cut off on both sides [default: the height]
    #[arg(long, value_name = "N", help_heading = VIDEO)]
    pub width: Option<usize>,

    /// Train on latents of the VAE in this folder instead of pixels: config.json and safetensors files of diffusers'
    /// AutoencoderKLWan
    #[arg(long, value_name = "DIR", help_heading = VIDEO)]
    pub vae: Option<PathBuf>,

    /// What a block of frames sees of earlier ones while it learns: clean frames or noisy ones [default: teacher]
    #[arg(long, value_enum, help_heading = OBJECTIVE)]
    pub forcing: Option<ForcingFlag>,

    /// Latent frames that are denoised together [default: 2]
    #[arg(long, value_name = "N", help_heading = OBJECTIVE)]
    pub block: Option<usize>,

    /// The first frame is given: it is clean and bears no loss
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = OBJECTIVE)]
    pub image_to_video: Option<bool>,

    /// Latent frames that a block sees, its own and the sink included; in training under diffusion forcing alone
    /// [default: all]
    #[arg(long, value_name = "N", help_heading = OBJECTIVE)]
    pub window: Option<usize>,

    /// Latent frames at the start that stay visible [default: 0]
    #[arg(long, value_name = "N", help_heading = OBJECTIVE)]
    pub sink: Option<usize>,

    /// Shift of the noise levels towards noise [default: 5]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = OBJECTIVE)]
    pub shift: Option<f64>,

    /// Share of samples that learn without their captions, for --guidance [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = OBJECTIVE)]
    pub text_dropout: Option<f64>,

    /// How it learns.
    #[command(flatten)]
    #[serde(flatten)]
    pub learning: LearningFlags,

    /// Where its state goes and comes from.
    #[command(flatten)]
    #[serde(flatten)]
    pub state: StateFlags,

    /// Write samples into this folder: videos, and a sheet of their frames
    #[arg(long, value_name = "DIR", help_heading = SAMPLES)]
    pub sample: Option<PathBuf>,

    /// Write them after every so many steps, and after the last [default: after the last]
    #[arg(long, value_name = "N", help_heading = SAMPLES)]
    pub sample_every: Option<usize>,

    /// How many [default: 2, and one for each rank of dp at least]
    #[arg(long, value_name = "N", help_heading = SAMPLES)]
    pub samples: Option<usize>,

    /// Their latent frames [default: --frames]
    #[arg(long, value_name = "N", help_heading = SAMPLES)]
    pub sample_frames: Option<usize>,

    /// Steps from noise to a clean block [default: 20]
    #[arg(long, value_name = "N", help_heading = SAMPLES)]
    pub sample_steps: Option<usize>,

    /// How it goes from noise to a clean block [default: unipc]
    #[arg(long, value_enum, help_heading = SAMPLES)]
    pub solver: Option<SolverFlag>,

    /// How far samples follow their captions beyond what was learnt; 1 does not [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = SAMPLES)]
    pub guidance: Option<f64>,

    /// Frames a second of the videos written [default: 8]
    #[arg(long, value_name = "N", help_heading = SAMPLES)]
    pub fps: Option<usize>,

    /// The model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: VideoModelFlags,
}

impl AsMut<RunFlags> for VideoTrainFlags {
    fn as_mut(&mut self) -> &mut RunFlags {
        &mut self.run
    }
}
