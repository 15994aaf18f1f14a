//! The steps of training, of any model on any data: what the training programs share.

use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::Device;
use burn_sp::comm::{CommError, Counter, raise};
use burn_sp::train::{
    LossShare, ParamLayouts, ParamShards, ShardedOptimizer, clip_by_global_norm, shard_parameters, sum_gradients,
};
use burn_sp::{SpDevice, launch_module};

use crate::RunError;
use crate::config::{LearningConfig, RunConfig, StateConfig};
use crate::everyone::{agree, everyones};
use crate::flags::{DeviceKind, Engine, Shard};
use crate::memory;
use crate::meter::{Figures, Gauge, Meter};
use crate::progress::Progress;
use crate::report::{Memory, Report, Step, median_seconds, method};
use crate::saving::{Keeper, Saving};

/// Parameters are f32.
const PARAMETER_BYTES: usize = 4;

/// What a rank trains: the data and the loss of a model.
pub(crate) trait Task {
    /// The model.
    type Model: Module;
    /// The data of a micro-step.
    type Sample;

    /// This rank's part of the model.
    fn shard(model: Self::Model, device: &SpDevice) -> (Self::Model, ParamLayouts);

    /// The data of a micro-step, counted through all steps.
    fn sample(&mut self, micro_step: u64) -> Self::Sample;

    /// How many terms the loss of a step has, over all ranks and these micro-steps.
    fn count(&self, samples: &[Self::Sample]) -> u64;

    /// This rank's share of the loss.
    fn loss(&self, model: &Self::Model, sample: Self::Sample, count: u64, micro_step: u64) -> LossShare;

    /// A step is done. All ranks call it.
    fn after(&mut self, _step: usize, _model: &Self::Model) {}

    /// The loss on data that was held out, if there is any.
    fn validate(&self, _model: &Self::Model) -> Option<f64> {
        None
    }
}

/// A run of a program.
pub(crate) struct Job<'a> {
    pub program: &'static str,
    pub run: &'a RunConfig,
    pub learning: &'a LearningConfig,
    pub state: &'a StateConfig,
    /// What a person is told first.
    pub lines: Vec<String>,
    /// What tells the data apart from others.
    pub data: String,
    /// For the report.
    pub config: serde_json::Value,
    /// What a saved state says of the model, beside that.
    pub transformer: Option<serde_json::Value>,
}

impl Job<'_> {
    /// Trains a model on all ranks, each with a task of its own, which is made knowing how parameters lie and are shared out.
    pub fn train<'t, T: Task + 't>(
        self,
        model: T::Model,
        task: impl Fn(&SpDevice, &ParamLayouts, ParamShards) -> T + Send + Sync + 't,
        progress: &Progress,
    ) -> Result<Report, RunError> {
        let (run, learning) = (self.run, self.learning);
        let mut config = self.config.clone();
        if let Some(transformer) = &self.transformer {
            config["transformer"] = transformer.clone();
        }
        let saving = Saving::new(self.state, self.program, run.steps, run.seed, config, &self.data);
        // Only rank 0 reads and writes states, so only its host needs the folders.
        let resumed = match run.only_rank()? {
            None | Some(0) => saving.check()?,
            Some(_) => None,
        };
        memory::unranked().reset_peak();
        let devices: Vec<_> = run.devices()?.into_iter().map(Device::autodiff).collect();
        for line in self.lines.iter().chain(&resumed) {
            progress.line(line);
        }
        progress.line(&format!("model: {} parameters", model.num_params()));
        let mut outcomes = launch_module(&run.launch(), &devices, model, |device, model| {
            let account = memory::enter(device.rank());
            agree(&self.config, &self.data, device.mesh().world().as_ref());
            let gauge = match run.device {
                DeviceKind::Flex => Gauge::Host(account),
                _ => Gauge::Pool {
                    device: device.device().clone(),
                    ranks: run.ranks.div_ceil(devices.len()),
                },
            };
            let (model, layouts) = T::shard(model, &device);
            let (model, layouts, shards) = match learning.shard {
                Shard::Parameters => {
                    let (model, shards) = shard_parameters(model, &device, &layouts);
                    (model, shards.layouts().clone(), shards)
                }
                Shard::None | Shard::Optimizer => (model, layouts, ParamShards::default()),
            };
            let keeper = saving.on(&device, &layouts, &shards);
            let (model, optimizer, done) = keeper.resume(model, Optimizer::new(learning));
            let task = task(&device, &layouts, shards);
            let meter = Meter::new(gauge, model.num_params() * PARAMETER_BYTES);
            Rank {
                meter,
                device,
                run,
                learning,
                layouts,
                optimizer,
                keeper,
                done,
                task,
            }
            .run(model, progress)
        })?;
        progress.finish();
        // Steps, losses and everyone's figures are known to every rank; there is one in every process.
        Ok(self.report(outcomes.swap_remove(0)))
    }

    fn report(self, outcome: Outcome) -> Report {
        let run = self.run;
        let Outcome {
            steps,
            validation_loss,
            figures,
        } = outcome;
        let of = |figure: fn(&Figures) -> u64| -> Vec<u64> { figures.iter().map(figure).collect() };
        let known = run.device != DeviceKind::Flex || memory::measured();
        let measured = |bytes: Vec<u64>| if known { bytes } else { vec![0; run.ranks] };
        let memory = Memory {
            peak_bytes_per_rank: measured(of(|figures| figures.peak)),
            peak_activation_bytes_per_rank: measured(of(|figures| figures.activation)),
            parameter_bytes_per_rank: of(|figures| figures.parameters),
            optimizer_bytes_per_rank: self.optimizer_bytes(of(|figures| 2 * figures.parameters)),
            gradient_bytes_per_rank: of(|figures| figures.parameters),
            bucket_bytes_per_rank: measured(of(|figures| figures.buckets)),
            resident_peak_bytes_per_process: match run.engine {
                Engine::Threads => memory::resident_peak().into_iter().collect(),
                _ => of(|figures| figures.resident),
            },
            other_threads_peak_bytes: match memory::unranked_work_for_a_rank() {
                true => 0,
                false => memory::unranked().peak() as u64,
            },
            method: method(run.device),
        };
        let communication = figures.iter().flat_map(|figures| figures.traffic.clone()).collect();
        let median = median_seconds(&steps);
        Report {
            program: self.program.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            engine: run.engine,
            device: run.device,
            ranks: run.ranks,
            mesh: run.mesh(),
            config: self.config,
            steps,
            validation_loss,
            tokens_per_second: run.tokens_per_step() as f64 / median,
            step_seconds_median: median,
            memory,
            communication,
        }
    }

    /// Of two moments. Shares differ by an element a parameter at most.
    fn optimizer_bytes(&self, whole: Vec<u64>) -> Vec<u64> {
        let RunConfig { dp, ring, ulysses, .. } = *self.run;
        let ranks = match self.learning.shard {
            Shard::None | Shard::Parameters => 1,
            Shard::Optimizer => (dp * ring * ulysses) as u64,
        };
        whole.into_iter().map(|bytes| bytes.div_ceil(ranks)).collect()
    }
}

/// What a rank brings home.
struct Outcome {
    steps: Vec<Step>,
    validation_loss: Option<f64>,
    /// Of all ranks.
    figures: Vec<Figures>,
}

/// One rank at work.
struct Rank<'a, T> {
    device: SpDevice,
    run: &'a RunConfig,
    learning: &'a LearningConfig,
    meter: Meter,
    layouts: ParamLayouts,
    optimizer: Optimizer,
    keeper: Keeper<'a>,
    /// Steps of earlier runs.
    done: usize,
    task: T,
}

/// Who keeps the optimizer's state.
pub(crate) enum Optimizer {
    /// Every rank that of the parameters it holds.
    Whole(ModuleOptimizer),
    /// Every rank its share.
    Shared(ShardedOptimizer),
}

impl Optimizer {
    fn new(learning: &LearningConfig) -> Self {
        let adamw = AdamWConfig::new()
            .with_beta_1(0.9)
            .with_beta_2(0.95)
            .with_epsilon(1e-8)
            .with_weight_decay(0.1)
            .init();
        match learning.shard {
            Shard::None | Shard::Parameters => Optimizer::Whole(adamw),
            Shard::Optimizer => Optimizer::Shared(ShardedOptimizer::new(adamw)),
        }
    }
}

impl<T: Task> Rank<'_, T> {
    fn run(mut self, mut model: T::Model, progress: &Progress) -> Outcome {
        let first = self.device.rank() == 0;
        if first {
            progress.resume(self.done);
        }
        self.device.mesh().world().reset_statistics();
        let mut steps = Vec::with_capacity(self.run.steps - self.done);
        let mut traffic = Vec::new();
        for step in self.done..self.run.steps {
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
            give_up_if_diverged(&self.device, &done, self.learning.lr);
            if first {
                progress.step(&done);
            }
            steps.push(done);
            let world = self.device.mesh().world();
            add(&mut traffic, world.statistics());
            self.meter.step_done();
            self.keeper.save(step + 1, &model, &self.optimizer);
            self.task.after(step + 1, &model);
            world.reset_statistics();
            self.meter.skip();
        }
        let validation_loss = self.task.validate(&model);
        let own = self.meter.finish(traffic);
        Outcome {
            steps,
            validation_loss,
            figures: everyones(&own, self.device.mesh().world().as_ref()),
        }
    }

    /// One step: the updated model, the loss and the gradients' norm.
    fn step(&mut self, step: usize, model: T::Model) -> (T::Model, f64, f64) {
        self.meter.step_starts();
        let first = (step * self.run.accumulate) as u64;
        let micro_steps = first..first + self.run.accumulate as u64;
        let samples: Vec<T::Sample> = micro_steps.clone().map(|micro| self.task.sample(micro)).collect();
        let count = self.task.count(&samples);

        let mut accumulator = GradientsAccumulator::new();
        let mut loss = 0.0;
        for (micro_step, sample) in micro_steps.zip(samples) {
            let share = tracing::trace_span!("forward").in_scope(|| self.task.loss(&model, sample, count, micro_step));
            self.meter.forward_done();
            let gradients =
                tracing::trace_span!("backward").in_scope(|| GradientsParams::from_grads(share.backward(), &model));
            self.meter.backward_done();
            accumulator.accumulate(&model, gradients);
            loss += share.value();
        }

        self.meter.sum_starts();
        let (mesh, layouts, lr) = (self.device.mesh(), &self.layouts, self.learning.lr);
        let clip = (self.learning.clip > 0.0).then_some(self.learning.clip);
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
}

/// Adds the counters of some steps to those of others.
fn add(all: &mut Vec<Counter>, more: Vec<Counter>) {
    for counter in more {
        let same = |other: &&mut Counter| (&other.op, &other.axis) == (&counter.op, &counter.axis);
        match all.iter_mut().find(same) {
            Some(sum) => {
                sum.calls += counter.calls;
                sum.bytes_sent += counter.bytes_sent;
                sum.seconds += counter.seconds;
            }
            None => all.push(counter),
        }
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
