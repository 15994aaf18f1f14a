//! Training a transformer on bytes or tokens, which are split over the mesh.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_sp::attention::Mask;
use burn_sp::comm::{CommError, raise};
use burn_sp::data::TokenBatch;
use burn_sp::nn::DropoutKey;
use burn_sp::train::{LossShare, ParamLayouts, ParamShards, valid_tokens, whole_module};
use burn_sp::{SpDevice, seeded};
use burn_sp_models::transformer::{ForwardOptions, HuggingFace, Transformer, tokens_and_labels};

use crate::config::{TrainConfig, refuse};
use crate::flags::Shape;
use crate::memory;
use crate::progress::Progress;
use crate::report::Report;
use crate::text::Text;
use crate::tokens::{Tokens, eos_of, load_tokenizer};
use crate::trainer::{Job, Task};
use crate::{InputError, RunError};

/// Held-out tokens that validation looks at, in at least one window and at most [`VALIDATION_WINDOWS`].
const VALIDATION_TOKENS: usize = 16_384;
const VALIDATION_WINDOWS: usize = 16;

/// What is learned from.
enum Data<'a> {
    Text(&'a Text),
    Tokens(&'a Tokens),
}

/// Trains as configured and says how it went.
///
/// # Errors
/// If the text is too short, or tokens cannot be had (before any rank starts), or the ranks fail.
pub fn train(config: &TrainConfig, progress: &Progress) -> Result<Report, RunError> {
    if !config.data.is_bytes() {
        let tokens = Tokens::open(config, progress)?;
        memory::unranked_work_for(config.run.only_rank()?);
        return train_data(config, Data::Tokens(&tokens), progress);
    }
    let text = Text::read(config.text.as_deref())?;
    memory::unranked_work_for(config.run.only_rank()?);
    train_on(config, &text, progress)
}

/// [`train`] on a text that has been read, a byte a token. Whom the memory of threads that are no rank counts for is up to
/// the caller: [`memory::unranked_work_for`].
///
/// # Errors
/// As [`train`], or if the configuration asks for other tokens.
pub fn train_on(config: &TrainConfig, text: &Text, progress: &Progress) -> Result<Report, RunError> {
    if !config.data.is_bytes() {
        refuse("--tokenizer, --tokens: this program trains on bytes; leave them out")?;
    }
    text.check(config.run.seq_len)?;
    train_data(config, Data::Text(text), progress)
}

fn train_data(config: &TrainConfig, data: Data, progress: &Progress) -> Result<Report, RunError> {
    let (line, digest) = match data {
        Data::Text(text) => (text.line(), text.digest()),
        Data::Tokens(tokens) => (tokens.line(), tokens.digest()),
    };
    let checkpoint = open(config)?;
    let job = Job {
        program: "train-transformer",
        run: &config.run,
        learning: &config.learning,
        state: &config.state,
        lines: vec![config.run.mesh_line(), line],
        data: digest,
        config: serde_json::to_value(config).unwrap_or_default(),
        transformer: config
            .transformer
            .as_ref()
            .map(|own| serde_json::to_value(own).unwrap_or_default()),
    };
    let task = |device: &SpDevice, layouts: &ParamLayouts, shards| Language {
        device: device.clone(),
        config,
        data: &data,
        checkpoint: checkpoint.as_ref(),
        layouts: layouts.clone(),
        shards,
    };
    let report = job.train(build(config, checkpoint.as_ref())?, task, progress)?;
    if let Some(folder) = &config.export {
        progress.line(&format!("exported: {}", folder.display()));
    }
    Ok(report)
}

/// What the model starts from, and in whose form it is written: the checkpoint of `--pretrained`, or a new one.
fn open(config: &TrainConfig) -> Result<Option<HuggingFace>, InputError> {
    let (checkpoint, flag) = match (&config.pretrained, &config.export) {
        (Some(folder), _) => (HuggingFace::open(folder), "--pretrained"),
        (None, Some(_)) => (HuggingFace::new(&config.model()), "--export"),
        (None, None) => return Ok(None),
    };
    let wrong = |error| InputError(format!("{flag} {error}"));
    let mut checkpoint = checkpoint.map_err(wrong)?;
    if config.pretrained.is_none() && config.shape == Shape::Llama {
        // Rotary positions have no end, but what it was trained on has.
        checkpoint = checkpoint
            .with_setting("max_position_embeddings", config.run.seq_len)
            .map_err(wrong)?;
    }
    if let Some(tokenizer) = &config.data.tokenizer {
        checkpoint = checkpoint.with_tokenizer(tokenizer);
        if let Some(eos) = &config.data.eos {
            let end = eos_of(&load_tokenizer(tokenizer)?, eos)?;
            checkpoint = checkpoint.with_setting("eos_token_id", end).map_err(wrong)?;
        }
    }
    Ok(Some(checkpoint))
}

/// The initial model: a function of the seed, whatever the device, or what is read. A state that is resumed brings weights
/// of its own.
fn build(config: &TrainConfig, checkpoint: Option<&HuggingFace>) -> Result<Transformer, InputError> {
    let cpu = Device::flex().autodiff();
    match checkpoint.filter(|_| config.pretrained.is_some() && config.state.resume.is_none()) {
        Some(checkpoint) => {
            let model = checkpoint.load(&cpu);
            let mut model = model.map_err(|error| InputError(format!("--pretrained {error}")))?;
            (model.dropout, model.attention_dropout) = (config.dropout, config.attention_dropout);
            Ok(model)
        }
        None => Ok(seeded(&cpu, config.run.seed, |device| config.model().init(device))),
    }
}

/// A rank's part of the data.
struct Language<'a> {
    device: SpDevice,
    config: &'a TrainConfig,
    data: &'a Data<'a>,
    checkpoint: Option<&'a HuggingFace>,
    layouts: ParamLayouts,
    shards: ParamShards,
}

impl Task for Language<'_> {
    type Model = Transformer;
    type Sample = TokenBatch;

    fn shard(model: Transformer, device: &SpDevice) -> (Transformer, ParamLayouts) {
        model.shard(device)
    }

    fn sample(&mut self, micro_step: u64) -> TokenBatch {
        match self.data {
            Data::Text(text) => {
                let run = &self.config.run;
                let (batch, accumulate) = (run.batch as u64, run.accumulate as u64);
                let (step, first) = (micro_step / accumulate, micro_step % accumulate * batch);
                let samples = first..first + batch;
                windows(
                    text.windows(run.seed, step, samples, run.seq_len, self.device.device()),
                    &self.device,
                )
            }
            Data::Tokens(tokens) => tokens.batch(micro_step, &self.device),
        }
    }

    fn count(&self, samples: &[TokenBatch]) -> u64 {
        valid_tokens(samples.iter().map(|batch| &batch.labels))
    }

    fn loss(&self, model: &Transformer, batch: TokenBatch, count: u64, micro_step: u64) -> LossShare {
        let dropout = DropoutKey {
            seed: self.config.run.seed,
            step: micro_step,
            layer: 0,
        };
        let options = self.options(batch.mask, Some(dropout));
        model.loss(batch.tokens, &batch.labels, count, &options)
    }

    /// Writes the checkpoint, if this is the last step.
    fn after(&mut self, step: usize, model: &Transformer) {
        let (Some(folder), Some(checkpoint)) = (&self.config.export, self.checkpoint) else {
            return;
        };
        if step < self.config.run.steps {
            return;
        }
        if let Some(whole) = whole_module(model, &self.layouts, &self.shards, &self.device)
            && let Err(error) = checkpoint.save(&whole, folder)
        {
            raise(CommError::failed(0, format!("--export {error}")));
        }
    }

    /// The mean loss over held-out windows, without a graph.
    fn validate(&self, model: &Transformer) -> Option<f64> {
        if !self.config.validate {
            return None;
        }
        let _span = tracing::trace_span!("validation").entered();
        let run = &self.config.run;
        let model = model.valid();
        let device = SpDevice::new(self.device.device().clone().inner(), self.device.mesh().clone());
        let count = (VALIDATION_TOKENS / run.seq_len).clamp(1, VALIDATION_WINDOWS);
        let batches = match self.data {
            Data::Text(text) => {
                let all = text.validation(count, run.seq_len, run.batch, device.device());
                all.into_iter().map(|batch| windows(batch, &device)).collect()
            }
            Data::Tokens(tokens) => tokens.validation(count, run.batch, &device),
        };
        let count = self.count(&batches);
        let losses = batches.into_iter().map(|batch| {
            let options = self.options(batch.mask, None);
            model.loss(batch.tokens, &batch.labels, count, &options).value()
        });
        Some(losses.sum())
    }
}

impl Language<'_> {
    fn options(&self, mask: Mask, dropout: Option<DropoutKey>) -> ForwardOptions {
        ForwardOptions {
            kv: self.config.run.kv_move(),
            mask: match (mask, self.config.mask()) {
                (Mask::Causal, mask) | (mask, Mask::Causal) => mask,
                (documents, window) => documents.and(window),
            },
            dropout,
            memory: self.config.learning.memory(self.shards.clone()),
        }
    }
}

/// From windows of one token more than the sequences have.
fn windows(windows: Tensor<2, Int>, device: &SpDevice) -> TokenBatch {
    let (tokens, labels) = tokens_and_labels(windows, device);
    TokenBatch {
        tokens,
        labels,
        mask: Mask::Causal,
    }
}
