//! The flags of training a transformer.

use std::path::PathBuf;

use burn_sp::attention::Mask;
use burn_sp::layout::{AttentionWorkload, Links, MeshShape};
use burn_sp_models::transformer::{PositionKind, TransformerConfig};
use serde::{Deserialize, Serialize};

use super::{DataConfig, LearningConfig, RunConfig, StateConfig, at_least_one, refuse};
use crate::InputError;
use crate::flags::{ModelFlags, Shape, TrainFlags};

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
    pub data: DataConfig,
    /// Entries of the model's vocabulary.
    #[serde(skip)]
    pub vocabulary: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pretrained: Option<PathBuf>,
    /// The model of `pretrained`.
    #[serde(skip)]
    pub transformer: Option<TransformerConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export: Option<PathBuf>,
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
    /// Completes the flags and checks them, all but the text and the tokens themselves.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self) -> Result<TrainConfig, InputError> {
        let learning = self.learning.resolve(1e-3)?;
        let pretrained = self.checkpoint.resolve(self.run.silent)?;
        let (model, data) = match &pretrained {
            Some(pretrained) => (
                pretrained.complete(self.model.clone())?,
                pretrained.with_tokenizer(&self.data),
            ),
            None => (self.model.clone(), self.data.clone()),
        };
        let (data, vocabulary) = data.resolve(self.text.as_deref())?;
        let vocabulary = match &pretrained {
            Some(pretrained) => pretrained.vocabulary(vocabulary, data.is_bytes())?,
            None => vocabulary,
        };
        let transformer = pretrained.map(|pretrained| pretrained.transformer);
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
        } = model;
        match window {
            Some(0) => return refuse("--window 0: a token sees itself at least; use 1, or leave it out"),
            Some(_) if self.checkpoint.export.is_some() => {
                return refuse("--window --export: a Llama or GPT-2 elsewhere would see all tokens; leave one out");
            }
            _ => {}
        }
        let shape = shape.unwrap_or_default();
        let hidden = at_least_one("--hidden", hidden, 256)?;
        let heads = at_least_one("--heads", heads, 8)?;
        if transformer.is_none() && hidden % heads != 0 {
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
                head_dim: transformer.as_ref().map_or(hidden / heads, |own| own.head_dim),
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
            data,
            vocabulary,
            pretrained: self.checkpoint.pretrained.clone(),
            transformer,
            export: self.checkpoint.export.clone(),
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
        config.run.check_vocabulary(vocabulary)?;
        config.check_pack()?;
        config.check_positions()?;
        match config.model().problem() {
            Some(problem) => refuse(format!("model: {problem}")),
            None => Ok(config),
        }
    }
}

impl TrainConfig {
    /// Packed sequences of a replica share a row, and all rows are as long.
    fn check_pack(&self) -> Result<(), InputError> {
        let RunConfig { batch, dp, .. } = self.run;
        if !self.data.pack {
            return Ok(());
        }
        if batch % dp != 0 {
            return refuse(format!(
                "--pack --batch {batch} --dp {dp}: ranks of dp have as many packed sequences each; use --batch {} or {}",
                batch / dp * dp,
                batch.next_multiple_of(dp)
            ));
        }
        if self.shape == Shape::Gpt2 && batch > dp {
            return refuse(format!(
                "--pack --shape gpt2 --batch {batch}: {} packed sequences in a row need more positions than the model \
                 learns; use --batch {dp} and --accumulate",
                batch / dp
            ));
        }
        if self.attention_dropout > 0.0 && batch > dp {
            return refuse(format!(
                "--pack --attention-dropout {} --batch {batch}: which weights are dropped would depend on --dp, as {} \
                 packed sequences are in a row; use --batch {dp} and --accumulate",
                self.attention_dropout,
                batch / dp
            ));
        }
        Ok(())
    }

    /// A model that others trained knows so many positions.
    fn check_positions(&self) -> Result<(), InputError> {
        let Some(PositionKind::Learned { max }) = self.transformer.as_ref().map(|own| own.positions) else {
            return Ok(());
        };
        match self.run.seq_len {
            length if length > max => refuse(format!(
                "--seq-len {length}: the model of --pretrained knows {max} positions; use --seq-len {max} at most"
            )),
            _ => Ok(()),
        }
    }

    /// Which tokens a token sees.
    pub fn mask(&self) -> Mask {
        mask(self.window)
    }

    /// The model.
    pub fn model(&self) -> TransformerConfig {
        if let Some(own) = &self.transformer {
            return TransformerConfig {
                dropout: self.dropout,
                attention_dropout: self.attention_dropout,
                ..own.clone()
            };
        }
        let model = match self.shape {
            Shape::Llama => TransformerConfig::llama(self.vocabulary, self.hidden, self.layers, self.heads, self.ffn),
            Shape::Gpt2 => {
                TransformerConfig::gpt2(self.vocabulary, self.hidden, self.layers, self.heads, self.run.seq_len)
            }
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
