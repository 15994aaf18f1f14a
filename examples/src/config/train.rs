//! The flags of training a transformer.

use std::path::PathBuf;

use burn_sp::attention::Mask;
use burn_sp::layout::{AttentionWorkload, Links, MeshShape};
use burn_sp_models::transformer::TransformerConfig;
use serde::{Deserialize, Serialize};

use super::{LearningConfig, RunConfig, StateConfig, at_least_one, refuse};
use crate::InputError;
use crate::flags::{ModelFlags, Shape, TrainFlags};

/// Byte-level: every value of a byte is a token.
const VOCABULARY: usize = 256;

/// Elements are f32.
const ELEMENT_BYTES: usize = 4;

/// A training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct TrainConfig {
    #[serde(flatten)]
    pub run: RunConfig,
    /// Files and folders; none: the workspace's own.
    pub text: Option<Vec<PathBuf>>,
    #[serde(flatten)]
    pub learning: LearningConfig,
    /// No part of what a report says of a run: one that is run again starts anew.
    #[serde(skip)]
    pub state: StateConfig,
    pub shape: Shape,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub ffn: usize,
    pub window: Option<usize>,
    pub dropout: f64,
    pub attention_dropout: f64,
    /// Whether the model is tried on held-out text in the end.
    #[serde(skip, default = "yes")]
    pub validate: bool,
}

fn yes() -> bool {
    true
}

impl TrainFlags {
    /// Completes the flags and checks them, all but the text itself.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self) -> Result<TrainConfig, InputError> {
        let learning = self.learning.resolve(1e-3)?;
        let ModelFlags {
            shape,
            hidden,
            layers,
            heads,
            kv_heads,
            ffn,
            window,
            dropout,
            attention_dropout,
        } = self.model;
        if window == Some(0) {
            return refuse("--window 0: a token sees itself at least; use 1, or leave it out");
        }
        let shape = shape.unwrap_or_default();
        let hidden = at_least_one("--hidden", hidden, 256)?;
        let heads = at_least_one("--heads", heads, 8)?;
        if hidden % heads != 0 {
            let near = [hidden / heads * heads, hidden.div_ceil(heads) * heads];
            let works: Vec<_> = near.iter().filter(|n| **n > 0).map(usize::to_string).collect();
            return refuse(format!(
                "--hidden {hidden} --heads {heads}: the width is no multiple of the heads; use --hidden {}",
                works.join(" or ")
            ));
        }
        let kv_heads = at_least_one("--kv-heads", kv_heads, heads)?;
        let run = self.run.resolve(|run| {
            let workload = AttentionWorkload {
                batch: run.batch.saturating_mul(run.accumulate),
                tokens: run.seq_len,
                heads,
                kv_heads,
                head_dim: hidden / heads,
                element_bytes: ELEMENT_BYTES,
                mask: mask(window),
            };
            MeshShape::choose(run.ranks, &workload, &Links::threads())
        })?;
        let wide = match shape {
            Shape::Llama => (8 * hidden).div_ceil(3).next_multiple_of(16),
            Shape::Gpt2 => 4 * hidden,
        };
        let config = TrainConfig {
            run,
            text: self.text.clone(),
            learning,
            state: self.state.resolve(self.run.silent)?,
            shape,
            hidden,
            layers: at_least_one("--layers", layers, 4)?,
            heads,
            kv_heads,
            ffn: at_least_one("--ffn", ffn, wide)?,
            window,
            dropout: dropout.unwrap_or(0.0),
            attention_dropout: attention_dropout.unwrap_or(0.0),
            validate: true,
        };
        match config.model().problem() {
            Some(problem) => refuse(format!("model: {problem}")),
            None => Ok(config),
        }
    }
}

impl TrainConfig {
    /// Which tokens a token sees.
    pub fn mask(&self) -> Mask {
        mask(self.window)
    }

    /// The model.
    pub fn model(&self) -> TransformerConfig {
        let model = match self.shape {
            Shape::Llama => TransformerConfig::llama(VOCABULARY, self.hidden, self.layers, self.heads, self.ffn),
            Shape::Gpt2 => TransformerConfig::gpt2(VOCABULARY, self.hidden, self.layers, self.heads, self.run.seq_len),
        };
        TransformerConfig {
            kv_heads: self.kv_heads,
            ffn_size: self.ffn,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            ..model
        }
    }
}

fn mask(window: Option<usize>) -> Mask {
    match window {
        Some(size) => Mask::Window { size, sink: 0 },
        None => Mask::Causal,
    }
}
