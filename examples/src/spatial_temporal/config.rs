use burn_sp::layout::{MeshChoice, MeshShape};
use clap::Parser;
use serde::{Deserialize, Serialize};

use super::SpatialTemporalModelConfig;
use crate::InputError;
use crate::config::{RunConfig, at_least_one, refuse};
use crate::flags::{Kv, RunFlags};

const MODEL: &str = "Model and training";

/// Trains attention over space and time on moving waves, on one rank and on several, and compares losses and traffic.
///
/// With no flags: 2 ranks, clips of 16 frames of 64 pixels.
#[derive(Parser, Clone, Debug, Default, Serialize, Deserialize)]
#[command(name = "spatial-temporal", version, args_override_self = true)]
pub struct SpatialTemporalFlags {
    /// The run.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunFlags,

    /// Frames of a clip, a divisor of --seq-len; the rest are its pixels [default: 16]
    #[arg(long, value_name = "N", help_heading = MODEL)]
    pub frames: Option<usize>,

    /// Width [default: 64]
    #[arg(long, value_name = "N", help_heading = MODEL)]
    pub hidden: Option<usize>,

    /// Heads of either attention [default: 4]
    #[arg(long, value_name = "N", help_heading = MODEL)]
    pub heads: Option<usize>,

    /// Blocks of two attentions [default: 2]
    #[arg(long, value_name = "N", help_heading = MODEL)]
    pub layers: Option<usize>,

    /// Learning rate of AdamW, constant [default: 0.003]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = MODEL)]
    pub lr: Option<f64>,
}

impl AsMut<RunFlags> for SpatialTemporalFlags {
    fn as_mut(&mut self) -> &mut RunFlags {
        &mut self.run
    }
}

/// The flags, checked and completed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // They are documented where they are flags.
pub struct SpatialTemporalConfig {
    #[serde(flatten)]
    pub run: RunConfig,
    pub frames: usize,
    pub hidden: usize,
    pub heads: usize,
    pub layers: usize,
    pub lr: f64,
}

impl SpatialTemporalFlags {
    /// Completes the flags and checks them.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self) -> Result<SpatialTemporalConfig, InputError> {
        for (flag, ranks) in [("--ring", self.run.ring), ("--tp", self.run.tp)] {
            if let Some(ranks) = ranks.filter(|ranks| *ranks > 1) {
                return refuse(format!(
                    "{flag} {ranks}: tokens change hands over one axis here; use --ulysses {ranks}"
                ));
            }
        }
        // Ring, the default, stands in every report's configuration.
        if self.run.kv == Some(Kv::Gather) {
            return refuse("--kv gather: no keys and values travel here; leave it out");
        }
        let run = self.run.resolve(|run| {
            let reason = match run.ranks {
                1 => "nothing to split",
                _ => "the axis over which tokens change hands",
            };
            Some(MeshChoice {
                mesh: MeshShape::ulysses(run.ranks),
                reason: reason.into(),
            })
        })?;
        if run.accumulate > 1 {
            return refuse(format!(
                "--accumulate {}: every step is one here; use --batch",
                run.accumulate
            ));
        }
        let frames = at_least_one("--frames", self.frames, 16)?;
        if !run.seq_len.is_multiple_of(frames) {
            return refuse(format!(
                "--seq-len {} --frames {frames}: a clip is so many frames of so many pixels; use --seq-len {}",
                run.seq_len,
                run.seq_len.next_multiple_of(frames)
            ));
        }
        let hidden = at_least_one("--hidden", self.hidden, 64)?;
        let heads = at_least_one("--heads", self.heads, 4)?;
        if !hidden.is_multiple_of(heads) {
            return refuse(format!(
                "--hidden {hidden} --heads {heads}: the width is no multiple of the heads; use --hidden {}",
                hidden.next_multiple_of(heads)
            ));
        }
        let lr = self.lr.unwrap_or(3e-3);
        if !(lr.is_finite() && lr > 0.0) {
            return refuse(format!("--lr {lr}: use a rate above 0, such as 0.003"));
        }
        Ok(SpatialTemporalConfig {
            run,
            frames,
            hidden,
            heads,
            layers: at_least_one("--layers", self.layers, 2)?,
            lr,
        })
    }
}

impl SpatialTemporalConfig {
    /// The model.
    pub fn model(&self) -> SpatialTemporalModelConfig {
        SpatialTemporalModelConfig::new(self.hidden, self.heads).with_layers(self.layers)
    }

    /// Pixels of a frame.
    pub fn pixels(&self) -> usize {
        self.run.seq_len / self.frames
    }
}
