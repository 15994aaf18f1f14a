//! What is to be planned.

use bytesize::ByteSize;
use clap::Parser;
use serde::{Deserialize, Serialize};

use crate::InputError;
use crate::config::refuse;
use crate::flags::{RunFlags, TrainFlags};

const PLAN: &str = "Plan";

/// Says which meshes, recomputation, sharing and tiling fit a model and a sequence into the memory of a rank, what each
/// sends, how long a sequence it can take, and which to choose.
///
/// The flags of train-transformer say what is trained. An axis, --recompute, --shard or --mlp-tiles that is given is kept;
/// of those that are not, all are tried.
#[derive(Parser, Clone, Debug, Default, Serialize, Deserialize)]
#[command(name = "plan", version, args_override_self = true)]
pub struct PlanFlags {
    /// What is trained.
    #[command(flatten)]
    #[serde(flatten)]
    pub train: TrainFlags,

    /// Memory of a rank, such as 80GiB or 900MB [default: as much as it takes]
    #[arg(long, value_name = "SIZE", help_heading = PLAN)]
    pub memory: Option<String>,

    /// FLOP a second of a rank [default: 40e9, a CPU core]
    #[arg(long, value_name = "RATE", help_heading = PLAN)]
    pub flops: Option<f64>,

    /// Bytes a second that a rank sends [default: 4e9, a copy by a CPU core]
    #[arg(long, value_name = "RATE", help_heading = PLAN)]
    pub bandwidth: Option<f64>,

    /// Show every way, not only the best of each mesh
    #[arg(long, help_heading = PLAN)]
    #[serde(skip)]
    pub all: bool,

    /// Run small cases on this machine, and compare what was forecast with what was measured
    #[arg(long, help_heading = PLAN)]
    #[serde(skip)]
    pub check: bool,
}

impl AsMut<RunFlags> for PlanFlags {
    fn as_mut(&mut self) -> &mut RunFlags {
        &mut self.train.run
    }
}

/// How fast ranks are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// FLOP a second.
    pub flops: f64,
    /// Bytes a second that a rank sends.
    pub bandwidth: f64,
}

impl PlanFlags {
    /// Bytes that a rank may hold.
    ///
    /// # Errors
    /// One line, if that is no size.
    pub fn budget(&self) -> Result<Option<u64>, InputError> {
        let Some(text) = &self.memory else { return Ok(None) };
        match text.parse::<ByteSize>() {
            Ok(ByteSize(0)) => refuse("--memory 0: give it a size, such as 80GiB"),
            Ok(size) => Ok(Some(size.as_u64())),
            Err(_) => refuse(format!(
                "--memory {text}: that is no size; use one such as 80GiB or 900MB"
            )),
        }
    }

    /// How fast ranks are.
    ///
    /// # Errors
    /// One line, if a rate is not above 0.
    pub fn rates(&self) -> Result<Rates, InputError> {
        let rate = |flag: &str, value: Option<f64>, default: f64| match value.unwrap_or(default) {
            rate if rate.is_finite() && rate > 0.0 => Ok(rate),
            rate => refuse(format!("{flag} {rate}: use a rate above 0, such as {default:e}")),
        };
        Ok(Rates {
            flops: rate("--flops", self.flops, 40e9)?,
            bandwidth: rate("--bandwidth", self.bandwidth, 4e9)?,
        })
    }
}
