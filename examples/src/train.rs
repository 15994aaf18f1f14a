//! Training a byte-level transformer, its tokens split over the mesh.

use burn::module::Module;
use burn::tensor::{Device, Int};
use burn_sp::nn::DropoutKey;
use burn_sp::train::{LossShare, ParamLayouts, ParamShards, valid_tokens};
use burn_sp::{SpDevice, SpTensor, seeded};
use burn_sp_models::transformer::{ForwardOptions, Transformer, tokens_and_labels};

use crate::RunError;
use crate::config::TrainConfig;
use crate::memory;
use crate::progress::Progress;
use crate::report::Report;
use crate::text::Text;
use crate::trainer::{Job, Task};

/// Held-out tokens that validation looks at, in at least one window and at most [`VALIDATION_WINDOWS`].
const VALIDATION_TOKENS: usize = 16_384;
const VALIDATION_WINDOWS: usize = 16;

/// Trains as configured and says how it went.
///
/// # Errors
/// If the text is too short (before any rank starts), or the ranks fail.
pub fn train(config: &TrainConfig, progress: &Progress) -> Result<Report, RunError> {
    let text = Text::read(config.text.as_deref())?;
    memory::unranked_work_for(config.run.only_rank()?);
    train_on(config, &text, progress)
}

/// [`train`] on a text that has been read. Whom the memory of threads that are no rank counts for is up to the caller:
/// [`memory::unranked_work_for`].
///
/// # Errors
/// As [`train`].
pub fn train_on(config: &TrainConfig, text: &Text, progress: &Progress) -> Result<Report, RunError> {
    text.check(config.run.seq_len)?;
    let job = Job {
        program: "train-transformer",
        run: &config.run,
        learning: &config.learning,
        state: &config.state,
        lines: vec![config.run.mesh_line(), text.line()],
        data: text.digest(),
        config: serde_json::to_value(config).unwrap_or_default(),
    };
    let task = |device: &SpDevice, shards| Language {
        device: device.clone(),
        config,
        text,
        shards,
    };
    job.train(build(config), task, progress)
}

/// The initial model: a function of the seed, whatever the device.
fn build(config: &TrainConfig) -> Transformer {
    let cpu = Device::flex().autodiff();
    seeded(&cpu, config.run.seed, |device| config.model().init(device))
}

/// A rank's windows of a text.
struct Language<'a> {
    device: SpDevice,
    config: &'a TrainConfig,
    text: &'a Text,
    shards: ParamShards,
}

type Sample = (SpTensor<2, Int>, SpTensor<2, Int>);

impl Task for Language<'_> {
    type Model = Transformer;
    type Sample = Sample;

    fn shard(model: Transformer, device: &SpDevice) -> (Transformer, ParamLayouts) {
        model.shard(device)
    }

    /// Tokens and labels.
    fn sample(&mut self, micro_step: u64) -> Sample {
        let run = &self.config.run;
        let (batch, accumulate) = (run.batch as u64, run.accumulate as u64);
        let (step, first) = (micro_step / accumulate, micro_step % accumulate * batch);
        let samples = first..first + batch;
        let windows = self
            .text
            .windows(run.seed, step, samples, run.seq_len, self.device.device());
        tokens_and_labels(windows, &self.device)
    }

    fn count(&self, samples: &[Sample]) -> u64 {
        valid_tokens(samples.iter().map(|(_, labels)| labels))
    }

    fn loss(&self, model: &Transformer, (tokens, labels): Sample, count: u64, micro_step: u64) -> LossShare {
        let dropout = DropoutKey {
            seed: self.config.run.seed,
            step: micro_step,
            layer: 0,
        };
        model.loss(tokens, &labels, count, &self.options(Some(dropout)))
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
        let windows = self.text.validation(count, run.seq_len, run.batch, device.device());
        let samples: Vec<Sample> = windows
            .into_iter()
            .map(|windows| tokens_and_labels(windows, &device))
            .collect();
        let count = self.count(&samples);
        let losses = samples
            .into_iter()
            .map(|(tokens, labels)| model.loss(tokens, &labels, count, &self.options(None)).value());
        Some(losses.sum())
    }
}

impl Language<'_> {
    fn options(&self, dropout: Option<DropoutKey>) -> ForwardOptions {
        ForwardOptions {
            kv: self.config.run.kv_move(),
            mask: self.config.mask(),
            dropout,
            memory: self.config.learning.memory(self.shards.clone()),
        }
    }
}
