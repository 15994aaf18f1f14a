//! Forecasts compared with what was measured.

use burn_sp::layout::MeshShape;
use comfy_table::Table;
use indicatif::HumanBytes;
use serde::{Deserialize, Serialize};

use super::{PlanFlags, forecast, memory::Step};
use crate::config::TrainConfig;
use crate::flags::{LearningFlags, Recompute, RunFlags, Shard, TrainFlags, name};
use crate::progress::Progress;
use crate::summary::table;
use crate::text::Text;
use crate::train::train_on;
use crate::{InputError, RunError};

/// What a case took, and what was forecast.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Checked {
    /// What was run.
    pub config: TrainConfig,
    /// Forecast, of the rank that holds most.
    pub forecast: u64,
    /// Measured, of the rank that held most.
    pub measured: u64,
    /// Bytes that a rank sends in a step.
    pub sent_forecast: u64,
    /// Measured, the mean over the ranks.
    pub sent_measured: u64,
}

impl Checked {
    /// By how much the forecast of memory is off, of what was measured.
    pub fn error(&self) -> f64 {
        self.forecast as f64 / self.measured as f64 - 1.0
    }
}

/// Meshes, what is computed again, what is shared, tiles.
const CASES: [(&str, Recompute, Shard, usize); 20] = [
    ("", Recompute::None, Shard::None, 1),
    ("", Recompute::Attention, Shard::None, 1),
    ("", Recompute::AllButAttention, Shard::None, 1),
    ("", Recompute::Blocks, Shard::None, 1),
    ("", Recompute::Blocks, Shard::None, 4),
    ("u", Recompute::None, Shard::None, 1),
    ("u", Recompute::Blocks, Shard::None, 1),
    ("u", Recompute::Blocks, Shard::Optimizer, 1),
    ("u", Recompute::Blocks, Shard::Parameters, 4),
    ("r", Recompute::None, Shard::None, 1),
    ("r", Recompute::Attention, Shard::None, 1),
    ("r", Recompute::Blocks, Shard::Parameters, 1),
    ("t", Recompute::None, Shard::None, 1),
    ("t", Recompute::Blocks, Shard::None, 1),
    ("d", Recompute::None, Shard::Optimizer, 1),
    ("d", Recompute::None, Shard::Parameters, 1),
    ("ru", Recompute::None, Shard::None, 1),
    ("ru", Recompute::Blocks, Shard::Parameters, 1),
    ("ut", Recompute::None, Shard::None, 1),
    ("du", Recompute::AllButAttention, Shard::None, 1),
];

/// The cases, of the model and the lengths that the flags say: two ranks on each axis named.
///
/// # Errors
/// One line, if a case cannot run.
pub fn cases(flags: &PlanFlags) -> Result<Vec<TrainConfig>, InputError> {
    let case = |(axes, recompute, shard, tiles): &(&str, Recompute, Shard, usize)| {
        let two = |axis: char| if axes.contains(axis) { 2 } else { 1 };
        let mesh = MeshShape {
            dp: two('d'),
            ring: two('r'),
            ulysses: two('u'),
            tp: two('t'),
        };
        let run = RunFlags {
            seq_len: flags.train.run.seq_len.or(Some(2048)),
            // From the second step on there are moments.
            steps: Some(2),
            ..flags.train.run.clone()
        };
        TrainFlags {
            run: run.with_mesh(mesh),
            learning: LearningFlags {
                recompute: Some(*recompute),
                shard: Some(*shard),
                mlp_tiles: Some(*tiles),
                ..flags.train.learning.clone()
            },
            ..flags.train.clone()
        }
        .resolve()
    };
    CASES.iter().map(case).collect()
}

/// Runs the cases one after the other; `done` is told of each.
///
/// # Errors
/// As [`train`](crate::train::train).
pub fn check(flags: &PlanFlags, mut done: impl FnMut(&Checked)) -> Result<Vec<Checked>, RunError> {
    let cases = cases(flags)?;
    let text = Text::read(flags.train.text.as_deref())?;
    let mut checked = Vec::new();
    for mut config in cases {
        config.validate = false;
        let report = train_on(&config, &text, &Progress::quiet())?;
        let measured = report.memory.peak_bytes_per_rank.iter().max().copied().unwrap_or(0);
        let sent: u64 = report.communication.iter().map(|counter| counter.bytes_sent).sum();
        let case = Checked {
            forecast: forecast(&config).total(),
            measured,
            sent_forecast: Step::new(&config).bytes_sent(),
            sent_measured: sent / (report.ranks * report.steps.len()).max(1) as u64,
            config,
        };
        done(&case);
        checked.push(case);
    }
    Ok(checked)
}

/// The cases for a person.
pub fn check_table(checked: &[Checked]) -> Table {
    let mut table = table([
        "mesh",
        "recompute",
        "shared",
        "tiles",
        "forecast",
        "measured",
        "error",
        "sent, forecast",
        "sent, measured",
    ]);
    for case in checked {
        table.add_row([
            case.config.run.mesh().to_string(),
            name(case.config.learning.recompute),
            name(case.config.learning.shard),
            case.config.learning.mlp_tiles.to_string(),
            HumanBytes(case.forecast).to_string(),
            HumanBytes(case.measured).to_string(),
            format!("{:+.1} %", 100.0 * case.error()),
            HumanBytes(case.sent_forecast).to_string(),
            HumanBytes(case.sent_measured).to_string(),
        ]);
    }
    table
}
