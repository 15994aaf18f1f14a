//! The runs, one after another, and the figures to compare them by.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{MeasureConfig, MeshFlag};
use crate::progress::Progress;
use crate::report::Report;
use crate::text::Text;
use crate::train::train_on;
use crate::{RunError, memory};

/// All that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Which program.
    pub program: String,
    /// Of this package.
    pub version: String,
    /// Cores that the ranks of this process share.
    pub cores: usize,
    /// All that is needed to measure it again, as `--config` takes it.
    pub config: Value,
    /// A row for every run: all meshes at the shortest length, then at the next.
    pub summary: Vec<Row>,
    /// The runs' own reports, in the order of the rows.
    pub runs: Vec<Report>,
}

/// One run, beside the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// The mesh, as `--meshes` takes it.
    pub mesh: MeshFlag,
    /// The most bytes held at once by the rank that held most; 0 if memory was not measured.
    pub peak_bytes: u64,
    /// Of activations, likewise.
    pub activation_bytes: u64,
    /// Tokens of a step over the median time of one.
    pub tokens_per_second: f64,
    /// Over all steps but the first, which warms up.
    pub step_seconds_median: f64,
    /// The share of the ranks' time in training steps that they spent in collectives, waiting included.
    pub communication_share: f64,
    /// The loss of the last step.
    pub last_loss: f64,
    /// The largest difference of a loss, of any step or of held-out text, from that of the
    /// [reference](Measurement::reference) at the same length, relative to it. None for the reference itself.
    pub loss_difference: Option<f64>,
}

/// Runs all that is configured. `progress` makes what shows a run of so many steps.
///
/// # Errors
/// If the text is too short for the longest sequence (before any rank starts), or the ranks of a run fail.
pub fn measure(config: &MeasureConfig, progress: impl Fn(usize) -> Progress) -> Result<Measurement, RunError> {
    let paths = config.runs.first().and_then(|run| run.text.as_deref());
    // Once, so that all runs see the same, whatever happens to the files.
    let text = Text::read(paths)?;
    text.check(config.seq_lens.iter().copied().max().unwrap_or_default())?;

    // One rank like several: or it alone would count what the workers of the thread pool hold.
    memory::unranked_work_for(None);
    let mut runs = Vec::new();
    for (index, train) in config.runs.iter().enumerate() {
        let progress = progress(train.run.steps);
        if index == 0 {
            progress.line(&text.line());
        }
        progress.line(&format!(
            "run {} of {}: {} tokens, {}",
            index + 1,
            config.runs.len(),
            train.run.seq_len,
            MeshFlag(train.run.mesh()).label(),
        ));
        runs.push(train_on(train, &text, &progress.steps_only())?);
    }
    Ok(Measurement {
        program: "measure".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        config: config.json(),
        summary: rows(config, &runs),
        runs,
    })
}

fn rows(config: &MeasureConfig, runs: &[Report]) -> Vec<Row> {
    let meshes = config.meshes.len();
    let reference = reference(&config.meshes);
    let most = |ranks: &[u64]| ranks.iter().copied().max().unwrap_or_default();
    let row = |(index, report): (usize, &Report)| {
        let (length, mesh) = (index / meshes, index % meshes);
        let other = &runs[length * meshes + reference];
        Row {
            seq_len: config.seq_lens[length],
            mesh: config.meshes[mesh],
            peak_bytes: most(&report.memory.peak_bytes_per_rank),
            activation_bytes: most(&report.memory.peak_activation_bytes_per_rank),
            tokens_per_second: report.tokens_per_second,
            step_seconds_median: report.step_seconds_median,
            communication_share: report.communication_share(),
            last_loss: report.steps.last().map_or(f64::NAN, |step| step.loss),
            loss_difference: (mesh != reference).then(|| difference(report, other)),
        }
    };
    runs.iter().enumerate().map(row).collect()
}

/// What the others are compared with: one rank, if it is measured.
fn reference(meshes: &[MeshFlag]) -> usize {
    meshes.iter().position(MeshFlag::is_off).unwrap_or(0)
}

/// The largest relative difference of the losses of two runs.
fn difference(report: &Report, reference: &Report) -> f64 {
    let losses = |report: &Report| -> Vec<f64> {
        let steps = report.steps.iter().map(|step| step.loss);
        steps.chain(report.validation_loss).collect()
    };
    let pairs = losses(report).into_iter().zip(losses(reference));
    pairs.map(|(loss, of)| ((loss - of) / of).abs()).fold(0.0, f64::max)
}

impl Measurement {
    /// The rows by sequence length: those of all meshes at the shortest, then at the next.
    pub fn by_length(&self) -> impl Iterator<Item = &[Row]> {
        self.summary.chunk_by(|row, next| row.seq_len == next.seq_len)
    }

    /// The meshes.
    pub fn meshes(&self) -> Vec<MeshFlag> {
        let first = self.by_length().next().unwrap_or_default();
        first.iter().map(|row| row.mesh).collect()
    }

    /// The mesh that the others are compared with: `off`, if it is among them.
    pub fn reference(&self) -> MeshFlag {
        let meshes = self.meshes();
        meshes[reference(&meshes)]
    }
}
