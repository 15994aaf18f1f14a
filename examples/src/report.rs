//! What a run leaves behind for programs to read: `report.json`.

use std::path::Path;

use burn_sp::comm::Counter;
use burn_sp::layout::MeshShape;
use serde::{Deserialize, Serialize};

use crate::flags::{DeviceKind, Engine};
use crate::{RunError, memory};

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Which program.
    pub program: String,
    /// Of this package.
    pub version: String,
    /// How ranks ran.
    pub engine: Engine,
    /// Where tensors were.
    pub device: DeviceKind,
    /// How many ranks.
    pub ranks: usize,
    /// How they were arranged.
    pub mesh: MeshShape,
    /// All that is needed to run it again, as `--config` takes it.
    pub config: serde_json::Value,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// The mean loss over held-out text, after the last step.
    pub validation_loss: Option<f64>,
    /// Tokens of a step over the median time of one.
    pub tokens_per_second: f64,
    /// Over all steps but the first, which warms up.
    pub step_seconds_median: f64,
    /// Who held how much.
    pub memory: Memory,
    /// The traffic of the training steps.
    pub communication: Vec<Counter>,
}

/// One training step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// From 1.
    pub step: usize,
    /// The global mean over valid tokens.
    pub loss: f64,
    /// The gradients' global norm before clipping.
    pub grad_norm: f64,
    /// From the step's data to the updated weights.
    pub seconds: f64,
    /// Over all ranks.
    pub tokens: usize,
}

/// Bytes, by rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// The most held at once.
    pub peak_bytes_per_rank: Vec<u64>,
    /// The most that forward and backward held beside parameters, optimizer and gradients.
    pub peak_activation_bytes_per_rank: Vec<u64>,
    /// The parameters.
    pub parameter_bytes_per_rank: Vec<u64>,
    /// The optimizer's moments.
    pub optimizer_bytes_per_rank: Vec<u64>,
    /// The parameters' gradients.
    pub gradient_bytes_per_rank: Vec<u64>,
    /// What summing the gradients over the ranks needed beside them.
    pub bucket_bytes_per_rank: Vec<u64>,
    /// The most that every process had resident, from its start, code and all; none where the system does not say. Ranks
    /// that are threads are one process.
    pub resident_peak_bytes_per_process: Vec<u64>,
    /// The most that threads held which are no rank: the initial weights, the text, workers of the thread pool. 0 if
    /// they count for the only rank.
    pub other_threads_peak_bytes: u64,
    /// How all this was measured.
    pub method: String,
}

/// How memory was measured, in words.
pub(crate) fn method(device: DeviceKind) -> String {
    if device != DeviceKind::Flex {
        return "bytes in use in the device's memory pools when forward, backward and gradient sum end, shared evenly by \
                the ranks on the device; peaks within a phase are not seen. parameter, optimizer (two moments) and \
                gradient: computed from shapes"
            .into();
    }
    if !memory::measured() {
        return "not measured: the program was built without the counting allocator; only parameters, optimizer and \
                gradients are known"
            .into();
    }
    let others = match memory::unranked_work_for_a_rank() {
        true => "threads that are no rank (the thread pool's workers) count for the only rank",
        false => {
            "threads that are no rank (the thread pool's workers, and main with the initial weights) are reported beside"
        }
    };
    format!(
        "bytes live in a counting allocator, charged to the rank whose thread allocated them; {others}. \
         peak_activation: the most over all steps of the peak during forward minus what was live when the step started, \
         and of the peak during backward minus that and minus all parameters' gradients (also those of earlier \
         micro-steps, once each). bucket: the peak while gradients are summed, minus what was live when the step started \
         and the gradients. parameter, optimizer (two moments) and gradient: computed from shapes"
    )
}

impl Report {
    /// The share of the ranks' time in training steps that they spent in collectives, waiting included.
    pub fn communication_share(&self) -> f64 {
        let seconds: f64 = self.steps.iter().map(|step| step.seconds).sum();
        // From a positive zero: an empty sum of floats is a negative one.
        let communication = self
            .communication
            .iter()
            .fold(0.0, |sum, counter| sum + counter.seconds);
        communication / (seconds * self.ranks as f64)
    }
}

/// What a program does with its report in the end: writes it where it was asked for, and says so.
///
/// # Errors
/// If the file cannot be written.
pub fn leave(report: &impl Serialize, file: Option<&Path>) -> Result<(), RunError> {
    if let Some(file) = file {
        write_json(report, file)?;
        eprintln!("report: {}", file.display());
    }
    Ok(())
}

/// Writes a report of any kind as JSON.
///
/// # Errors
/// If the file cannot be written.
pub fn write_json(report: &impl Serialize, file: &Path) -> Result<(), RunError> {
    let failed = RunError::output("--report", file);
    let mut json = serde_json::to_string_pretty(report).map_err(|error| failed(error.into()))?;
    json.push('\n');
    std::fs::write(file, json).map_err(failed)
}

/// The median time of a step, without the first one if there are others.
pub(crate) fn median_seconds(steps: &[Step]) -> f64 {
    let warm = if steps.len() > 1 { &steps[1..] } else { steps };
    let mut seconds: Vec<f64> = warm.iter().map(|step| step.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    let (low, high) = ((seconds.len().max(1) - 1) / 2, seconds.len() / 2);
    match seconds.get(high) {
        Some(upper) => (seconds[low] + upper) / 2.0,
        None => 0.0,
    }
}
