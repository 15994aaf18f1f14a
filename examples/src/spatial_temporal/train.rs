use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_sp::comm::Counter;
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::{ParamLayouts, clip_by_global_norm, sum_gradients};
use burn_sp::{LaunchConfig, SpDevice, launch_module, seeded};
use indicatif::HumanBytes;

use super::{SpatialTemporalConfig, SpatialTemporalModel, clips};
use crate::RunError;
use crate::memory;
use crate::progress::Progress;
use crate::report::{Memory, Report, Step, median_seconds};
use crate::summary::table;
use crate::trainer::give_up_if_diverged;

const PARAMETER_BYTES: usize = 4;

/// The same training on one rank and on several.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The losses on one rank, step by step.
    pub one: Vec<f64>,
    /// The run on all ranks.
    pub report: Report,
    config: SpatialTemporalConfig,
}

/// Trains on the mesh, then on one rank.
///
/// # Errors
/// If the ranks fail.
pub fn train(config: &SpatialTemporalConfig, progress: &Progress) -> Result<Outcome, RunError> {
    progress.line(&config.run.mesh_line());
    let (steps, communication, parameters) = run(config, config.run.mesh(), progress)?;
    progress.finish();
    let (alone, _, _) = run(config, MeshShape::default(), &Progress::quiet())?;
    let one = alone.into_iter().map(|step| step.loss).collect();
    let median = median_seconds(&steps);
    let each = |bytes: usize| vec![bytes as u64; config.run.ranks];
    let report = Report {
        program: "spatial-temporal".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        engine: config.run.engine,
        device: config.run.device,
        ranks: config.run.ranks,
        mesh: config.run.mesh(),
        config: serde_json::to_value(config).unwrap_or_default(),
        steps,
        validation_loss: None,
        tokens_per_second: config.run.tokens_per_step() as f64 / median,
        step_seconds_median: median,
        memory: Memory {
            peak_bytes_per_rank: each(0),
            peak_activation_bytes_per_rank: each(0),
            parameter_bytes_per_rank: each(parameters * PARAMETER_BYTES),
            optimizer_bytes_per_rank: each(2 * parameters * PARAMETER_BYTES),
            gradient_bytes_per_rank: each(parameters * PARAMETER_BYTES),
            bucket_bytes_per_rank: each(0),
            resident_peak_bytes_per_process: memory::resident_peak().into_iter().collect(),
            other_threads_peak_bytes: 0,
            method: "memory is not measured; parameters, optimizer and gradients are computed from shapes".into(),
        },
        communication,
    };
    Ok(Outcome {
        one,
        report,
        config: config.clone(),
    })
}

/// Trains on a mesh: the steps, the traffic of all ranks, and the number of parameters.
fn run(
    config: &SpatialTemporalConfig,
    mesh: MeshShape,
    progress: &Progress,
) -> Result<(Vec<Step>, Vec<Counter>, usize), RunError> {
    let launch = LaunchConfig {
        mesh,
        ..config.run.launch()
    };
    let devices: Vec<_> = config.run.devices()?.into_iter().map(Device::autodiff).collect();
    // The same on every device.
    let cpu = Device::flex().autodiff();
    let model = seeded(&cpu, config.run.seed, |device| config.model().init(device));
    let parameters = model.num_params();
    let mut ranks = launch_module(&launch, &devices, model, |device, model| {
        steps(config, &device, model, progress)
    })?;
    let traffic = ranks
        .iter_mut()
        .flat_map(|(_, traffic)| std::mem::take(traffic))
        .collect();
    // Losses are the same on every rank.
    let (steps, _) = ranks.swap_remove(0);
    Ok((steps, traffic, parameters))
}

/// One rank's part of the training.
fn steps(
    config: &SpatialTemporalConfig,
    device: &SpDevice,
    mut model: SpatialTemporalModel,
    progress: &Progress,
) -> (Vec<Step>, Vec<Counter>) {
    let (mesh, layouts) = (device.mesh(), ParamLayouts::replicated());
    let mut optimizer = AdamWConfig::new().init();
    let mut done = Vec::with_capacity(config.run.steps);
    mesh.world().reset_statistics();
    for step in 0..config.run.steps {
        let _span = tracing::trace_span!("step", number = step + 1).entered();
        let start = Instant::now();
        let shape = [config.run.batch, config.frames, config.pixels(), config.hidden];
        let mut longer = shape;
        longer[1] += 1;
        let clips = clips(config.run.seed, step as u64, longer, device.device());
        let layout =
            Layout::replicated(shape)
                .shard(0, Axis::Dp, Split::Contiguous)
                .shard(1, Axis::Ulysses, Split::Contiguous);
        let frames = |from| device.distribute(clips.clone().narrow(1, from, config.frames), &layout);

        let share = tracing::trace_span!("forward").in_scope(|| model.loss(frames(0), frames(1)));
        let gradients =
            tracing::trace_span!("backward").in_scope(|| GradientsParams::from_grads(share.backward(), &model));
        let gradients = sum_gradients(&model, gradients, &layouts, mesh);
        let (gradients, grad_norm) = clip_by_global_norm(&model, gradients, None, &layouts, mesh);
        model = tracing::trace_span!("optimizer").in_scope(|| optimizer.step(config.lr, model, gradients));
        let now = Step {
            step: step + 1,
            loss: share.value(),
            grad_norm,
            seconds: start.elapsed().as_secs_f64(),
            tokens: config.run.tokens_per_step(),
        };
        give_up_if_diverged(device, &now, config.lr);
        if device.rank() == 0 {
            progress.step(&now);
        }
        done.push(now);
    }
    (done, mesh.world().statistics())
}

impl Outcome {
    /// Calls and bytes of all-to-all that a rank makes and sends in a step: the mean over the ranks.
    pub fn exchanged(&self) -> (f64, f64) {
        let (mut calls, mut bytes) = (0, 0);
        for counter in self
            .report
            .communication
            .iter()
            .filter(|counter| counter.op == "all_to_all")
        {
            calls += counter.calls;
            bytes += counter.bytes_sent;
        }
        let steps = (self.report.ranks * self.report.steps.len()) as f64;
        (calls as f64 / steps, bytes as f64 / steps)
    }

    /// What [`exchanged`](Self::exchanged) would be if each attention exchanged tokens for heads:
    /// `4 (s h / P) (P - 1) / P` elements (q, k, v and its output) in two all-to-all (q, k and v travel in one), forward
    /// and again backward.
    pub fn around_each_attention(&self) -> (f64, f64) {
        let config = &self.config;
        if config.run.ulysses == 1 {
            return (0.0, 0.0);
        }
        let ranks = config.run.ulysses as f64;
        // Two attentions a block, forward and backward.
        let passes = (2 * 2 * config.layers) as f64;
        let local = (config.run.tokens_per_step() / config.run.dp * config.hidden * PARAMETER_BYTES) as f64 / ranks;
        (2.0 * passes, 4.0 * passes * local * (ranks - 1.0) / ranks)
    }

    /// The tables that the program ends with.
    pub fn summary(&self) -> String {
        let mesh = self.report.mesh.to_string();
        let mut losses = table(["step", "loss on one rank", &format!("loss on {mesh}")]);
        let last = self.one.len().saturating_sub(1);
        let mut shown: Vec<usize> = (0..=5).map(|part| part * last / 5).collect();
        shown.dedup();
        for step in shown {
            losses.add_row([
                (step + 1).to_string(),
                format!("{:.6}", self.one[step]),
                format!("{:.6}", self.report.steps[step].loss),
            ]);
        }
        let mut traffic = table(["all-to-all around the attentions", "calls a step", "sent a step"]);
        let mut row = |name: &str, (calls, bytes): (f64, f64)| {
            traffic.add_row([
                name.to_string(),
                calls.to_string(),
                HumanBytes(bytes.round() as u64).to_string(),
            ]);
        };
        row("one between them, as counted", self.exchanged());
        row("two around each, as computed", self.around_each_attention());
        format!("{losses}\n{traffic}")
    }
}
