//! Training a byte-level transformer, its tokens split over the mesh.

use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int};
use burn_sp::comm::{CommError, raise};
use burn_sp::nn::DropoutKey;
use burn_sp::train::{
    ParamLayouts, ParamShards, ShardedOptimizer, clip_by_global_norm, shard_parameters, sum_gradients, valid_tokens,
};
use burn_sp::{SpDevice, SpTensor, launch_module, seeded};
use burn_sp_models::transformer::{ForwardOptions, Transformer, tokens_and_labels};

use crate::RunError;
use crate::config::{RunConfig, TrainConfig};
use crate::flags::{DeviceKind, Shard};
use crate::memory;
use crate::meter::{Figures, Gauge, Meter};
use crate::progress::Progress;
use crate::report::{Memory, Report, Step, median_seconds, method};
use crate::text::Text;

/// Held-out tokens that validation looks at, in at least one window and at most [`VALIDATION_WINDOWS`].
const VALIDATION_TOKENS: usize = 16_384;
const VALIDATION_WINDOWS: usize = 16;

/// Parameters are f32.
const PARAMETER_BYTES: usize = 4;

/// Trains as configured and says how it went.
///
/// # Errors
/// If the text is too short (before any rank starts), or the ranks fail.
pub fn train(config: &TrainConfig, progress: &Progress) -> Result<Report, RunError> {
    let text = Text::read(config.text.as_deref())?;
    memory::unranked_work_for_rank_0(config.run.ranks == 1);
    train_on(config, &text, progress)
}

/// [`train`] on a text that has been read. Whom the memory of threads that are no rank counts for is up to the caller:
/// [`memory::unranked_work_for_rank_0`].
///
/// # Errors
/// As [`train`].
pub fn train_on(config: &TrainConfig, text: &Text, progress: &Progress) -> Result<Report, RunError> {
    let run = &config.run;
    text.check(run.seq_len)?;
    memory::unranked().reset_peak();

    let devices: Vec<_> = run.devices()?.into_iter().map(Device::autodiff).collect();
    let model = build(config);
    let parameters = model.num_params();
    progress.line(&run.mesh_line());
    progress.line(&text.line());
    progress.line(&format!("model: {parameters} parameters"));

    let outcomes = launch_module(&run.launch(), &devices, model, |device, model| {
        let account = memory::enter(device.rank());
        let gauge = match run.device {
            DeviceKind::Flex => Gauge::Host(account),
            _ => Gauge::Pool {
                device: device.device().clone(),
                ranks: run.ranks.div_ceil(devices.len()),
            },
        };
        let (model, layouts) = model.shard(&device);
        let (model, layouts, shards) = match config.shard {
            Shard::Parameters => {
                let (model, shards) = shard_parameters(model, &device, &layouts);
                (model, shards.layouts().clone(), shards)
            }
            Shard::None | Shard::Optimizer => (model, layouts, ParamShards::default()),
        };
        let meter = Meter::new(gauge, model.num_params() * PARAMETER_BYTES);
        Rank {
            meter,
            device,
            config,
            run,
            text,
            layouts,
            shards,
            optimizer: Optimizer::new(config),
        }
        .run(model, progress)
    })?;
    progress.finish();
    Ok(report(config, outcomes))
}

/// The initial model: a function of the seed, whatever the device.
fn build(config: &TrainConfig) -> Transformer {
    let cpu = Device::flex().autodiff();
    seeded(&cpu, config.run.seed, |device| config.model().init(device))
}

/// What a rank brings home.
struct Outcome {
    steps: Vec<Step>,
    validation_loss: Option<f64>,
    figures: Figures,
}

/// One rank at work.
struct Rank<'a> {
    device: SpDevice,
    config: &'a TrainConfig,
    run: &'a RunConfig,
    text: &'a Text,
    meter: Meter,
    layouts: ParamLayouts,
    shards: ParamShards,
    optimizer: Optimizer,
}

/// Who keeps the optimizer's state.
enum Optimizer {
    /// Every rank that of the parameters it holds.
    Whole(ModuleOptimizer),
    /// Every rank its share.
    Shared(ShardedOptimizer),
}

impl Optimizer {
    fn new(config: &TrainConfig) -> Self {
        let adamw = AdamWConfig::new()
            .with_beta_1(0.9)
            .with_beta_2(0.95)
            .with_epsilon(1e-8)
            .with_weight_decay(0.1)
            .init();
        match config.shard {
            Shard::None | Shard::Parameters => Optimizer::Whole(adamw),
            Shard::Optimizer => Optimizer::Shared(ShardedOptimizer::new(adamw)),
        }
    }
}

type Sample = (SpTensor<2, Int>, SpTensor<2, Int>);

impl Rank<'_> {
    fn run(mut self, mut model: Transformer, progress: &Progress) -> Outcome {
        let first = self.device.rank() == 0;
        self.device.mesh().world().reset_statistics();
        let mut steps = Vec::with_capacity(self.run.steps);
        for step in 0..self.run.steps {
            let _span = tracing::trace_span!("step", number = step + 1).entered();
            let start = Instant::now();
            let (updated, loss, grad_norm) = self.step(step, model);
            model = updated;
            let done = Step {
                step: step + 1,
                loss,
                grad_norm,
                seconds: start.elapsed().as_secs_f64(),
                tokens: self.run.tokens_per_step(),
            };
            give_up_if_diverged(&self.device, &done, self.config.lr);
            if first {
                progress.step(&done);
            }
            steps.push(done);
        }
        let traffic = self.device.mesh().world().statistics();
        Outcome {
            steps,
            validation_loss: self.config.validate.then(|| self.validate(&model)),
            figures: self.meter.finish(traffic),
        }
    }

    /// One step: the updated model, the loss and the gradients' norm.
    fn step(&mut self, step: usize, model: Transformer) -> (Transformer, f64, f64) {
        self.meter.step_starts();
        let samples: Vec<Sample> = (0..self.run.accumulate).map(|micro| self.sample(step, micro)).collect();
        let count = valid_tokens(samples.iter().map(|(_, labels)| labels));

        let mut accumulator = GradientsAccumulator::new();
        let mut loss = 0.0;
        for (micro, (tokens, labels)) in samples.into_iter().enumerate() {
            let dropout = DropoutKey {
                seed: self.run.seed,
                step: (step * self.run.accumulate + micro) as u64,
                layer: 0,
            };
            let share = tracing::trace_span!("forward")
                .in_scope(|| model.loss(tokens, &labels, count, &self.options(Some(dropout))));
            self.meter.forward_done();
            let gradients =
                tracing::trace_span!("backward").in_scope(|| GradientsParams::from_grads(share.backward(), &model));
            self.meter.backward_done();
            accumulator.accumulate(&model, gradients);
            loss += share.value();
        }

        self.meter.sum_starts();
        let (mesh, layouts, lr) = (self.device.mesh(), &self.layouts, self.config.lr);
        let clip = (self.config.clip > 0.0).then_some(self.config.clip);
        let gradients = accumulator.grads();
        let (model, norm) = match &mut self.optimizer {
            Optimizer::Whole(optimizer) => {
                let gradients = sum_gradients(&model, gradients, layouts, mesh);
                self.meter.sum_done();
                let (gradients, norm) = clip_by_global_norm(&model, gradients, clip, layouts, mesh);
                let _span = tracing::trace_span!("optimizer").entered();
                (optimizer.step(lr, model, gradients), norm)
            }
            Optimizer::Shared(optimizer) => {
                let updated = optimizer.step(lr, model, gradients, clip, layouts, mesh);
                self.meter.sum_done();
                updated
            }
        };
        (model, loss, norm)
    }

    /// The tokens and labels of a micro-step.
    fn sample(&self, step: usize, micro: usize) -> Sample {
        let batch = self.run.batch as u64;
        let first = micro as u64 * batch;
        let windows = self.text.windows(
            self.run.seed,
            step as u64,
            first..first + batch,
            self.run.seq_len,
            self.device.device(),
        );
        tokens_and_labels(windows, &self.device)
    }

    fn options(&self, dropout: Option<DropoutKey>) -> ForwardOptions {
        ForwardOptions {
            kv: self.run.kv_move(),
            mask: self.config.mask(),
            dropout,
            memory: self.config.memory(self.shards.clone()),
        }
    }

    /// The mean loss over held-out windows, without a graph.
    fn validate(&self, model: &Transformer) -> f64 {
        let _span = tracing::trace_span!("validation").entered();
        let model = model.valid();
        let device = SpDevice::new(self.device.device().clone().inner(), self.device.mesh().clone());
        let count = (VALIDATION_TOKENS / self.run.seq_len).clamp(1, VALIDATION_WINDOWS);
        let windows = self
            .text
            .validation(count, self.run.seq_len, self.run.batch, device.device());
        let samples: Vec<Sample> = windows
            .into_iter()
            .map(|windows| tokens_and_labels(windows, &device))
            .collect();
        let count = valid_tokens(samples.iter().map(|(_, labels)| labels));
        let losses = samples
            .into_iter()
            .map(|(tokens, labels)| model.loss(tokens, &labels, count, &self.options(None)).value());
        losses.sum()
    }
}

/// Ends the run if a step's loss or gradient norm is not finite. Every rank sees the same two, so every rank ends it.
pub(crate) fn give_up_if_diverged(device: &SpDevice, step: &Step, lr: f64) {
    if step.loss.is_finite() && step.grad_norm.is_finite() {
        return;
    }
    let what = format!(
        "step {}: the loss is {} and the gradient norm {}; a smaller --lr (now {lr:?}) may help",
        step.step, step.loss, step.grad_norm
    );
    raise(CommError::failed(device.rank(), what))
}

/// Of two moments. Shares differ by an element a parameter at most.
fn optimizer_bytes(config: &TrainConfig, whole: Vec<u64>) -> Vec<u64> {
    let RunConfig { dp, ring, ulysses, .. } = config.run;
    let ranks = match config.shard {
        Shard::None | Shard::Parameters => 1,
        Shard::Optimizer => (dp * ring * ulysses) as u64,
    };
    whole.into_iter().map(|bytes| bytes.div_ceil(ranks)).collect()
}

fn report(config: &TrainConfig, outcomes: Vec<Outcome>) -> Report {
    let run = &config.run;
    let of =
        |figure: fn(&Figures) -> u64| -> Vec<u64> { outcomes.iter().map(|outcome| figure(&outcome.figures)).collect() };
    let known = run.device != DeviceKind::Flex || memory::measured();
    let measured = |bytes: Vec<u64>| if known { bytes } else { vec![0; run.ranks] };
    let memory = Memory {
        peak_bytes_per_rank: measured(of(|figures| figures.peak)),
        peak_activation_bytes_per_rank: measured(of(|figures| figures.activation)),
        parameter_bytes_per_rank: of(|figures| figures.parameters),
        optimizer_bytes_per_rank: optimizer_bytes(config, of(|figures| 2 * figures.parameters)),
        gradient_bytes_per_rank: of(|figures| figures.parameters),
        bucket_bytes_per_rank: measured(of(|figures| figures.buckets)),
        other_threads_peak_bytes: match memory::unranked_works_for_rank_0() {
            true => 0,
            false => memory::unranked().peak() as u64,
        },
        method: method(run.device),
    };
    let communication = outcomes
        .iter()
        .flat_map(|outcome| outcome.figures.traffic.clone())
        .collect();
    // Losses are the same on every rank.
    let (steps, validation_loss) = match outcomes.into_iter().next() {
        Some(first) => (first.steps, first.validation_loss),
        None => (Vec::new(), None),
    };
    let median = median_seconds(&steps);
    Report {
        program: "train-transformer".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        engine: run.engine,
        device: run.device,
        ranks: run.ranks,
        mesh: run.mesh(),
        config: serde_json::to_value(config).unwrap_or_default(),
        steps,
        validation_loss,
        tokens_per_second: run.tokens_per_step() as f64 / median,
        step_seconds_median: median,
        memory,
        communication,
    }
}
