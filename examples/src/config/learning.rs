//! The flags of learning, of every model.

use burn_sp::train::{self, ParamShards};
use burn_sp_models::transformer::{self, MemoryOptions};
use serde::{Deserialize, Serialize};

use super::{at_least_one, refuse};
use crate::InputError;
use crate::flags::{Keep, LearningFlags, Recompute, Shard};

/// How a model learns, and how it needs less memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // They are documented where they are flags.
pub struct LearningConfig {
    pub lr: f64,
    pub clip: f64,
    pub recompute: Recompute,
    pub keep: Keep,
    pub mlp_tiles: usize,
    pub shard: Shard,
}

impl LearningFlags {
    /// Completes the flags and checks them.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self, default_lr: f64) -> Result<LearningConfig, InputError> {
        let lr = self.lr.unwrap_or(default_lr);
        if !(lr.is_finite() && lr > 0.0) {
            return refuse(format!("--lr {lr}: use a rate above 0, such as {default_lr}"));
        }
        let clip = self.clip.unwrap_or(1.0);
        if !(clip.is_finite() && clip >= 0.0) {
            return refuse(format!("--clip {clip}: use a norm above 0, or 0 for no clipping"));
        }
        let shard = self.shard.unwrap_or_default();
        Ok(LearningConfig {
            lr,
            clip,
            recompute: self.recompute.unwrap_or(match shard {
                Shard::Parameters => Recompute::Blocks,
                Shard::None | Shard::Optimizer => Recompute::None,
            }),
            keep: self.keep.unwrap_or_default(),
            mlp_tiles: at_least_one("--mlp-tiles", self.mlp_tiles, 1)?,
            shard,
        })
    }
}

impl LearningConfig {
    /// How the model needs less memory, with these parameters shared out.
    pub fn memory(&self, shards: ParamShards) -> MemoryOptions {
        MemoryOptions {
            recompute: match self.recompute {
                Recompute::None => transformer::Recompute::None,
                Recompute::Blocks => transformer::Recompute::Blocks,
                Recompute::Attention => transformer::Recompute::Attention,
                Recompute::AllButAttention => transformer::Recompute::AllButAttention,
            },
            keep: match self.keep {
                Keep::Device => train::Keep::Device,
                Keep::Host => train::Keep::Host,
            },
            mlp_tiles: self.mlp_tiles,
            shards,
        }
    }
}
