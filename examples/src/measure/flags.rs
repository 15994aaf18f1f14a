//! Which lengths on which meshes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use burn_sp::layout::{Axis, MeshShape};
use clap::Parser;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::InputError;
use crate::config::{TrainConfig, at_least_one, check_output, refuse};
use crate::flags::{RunFlags, TrainFlags};

const MEASURE: &str = "Measurement";

// Unless flags say otherwise: all runs together take less than two minutes on two cores.
const SEQ_LEN: usize = 2048;
const BATCH: usize = 1;
const STEPS: usize = 8;

/// Trains the same model on the same data with sequence parallelism off and on, and compares memory, speed and losses.
///
/// With no flags: a small Llama on 512, 1,024 and 2,048 tokens, alone and on two ranks that share the work in three ways.
#[derive(Parser, Clone, Debug, Default, Serialize, Deserialize)]
#[command(name = "measure", version, args_override_self = true)]
#[command(mut_arg("seq_len", |arg| arg.help("Longest sequence; its half and quarter are measured too [default: 2048]")))]
#[command(mut_arg("ranks", |arg| arg.help("Ranks of the meshes, if none is given [default: 2]")))]
#[command(mut_arg("batch", |arg| arg.help("Sequences of a micro-step, over all ranks; dp splits them [default: 1]")))]
#[command(mut_arg("steps", |arg| arg.help("Steps of each run; the first is not timed [default: 8]")))]
pub struct MeasureFlags {
    /// What is trained.
    #[command(flatten)]
    #[serde(flatten)]
    pub train: TrainFlags,

    /// Meshes to compare, such as: off ulysses=4 ring=2,ulysses=2. off is one rank [default: off and the mesh given by
    /// axes; without, off ulysses=N ring=N tp=N for N ranks]
    #[arg(long, value_name = "MESH", num_args = 1.., help_heading = MEASURE)]
    pub meshes: Option<Vec<MeshFlag>>,

    /// Sequence lengths, in place of --seq-len
    #[arg(long, value_name = "N", num_args = 1.., help_heading = MEASURE)]
    pub seq_lens: Option<Vec<usize>>,

    /// Write the page with charts here [default: measure.html]
    #[arg(long, value_name = "FILE.html", help_heading = MEASURE)]
    pub page: Option<PathBuf>,
}

impl AsMut<RunFlags> for MeasureFlags {
    fn as_mut(&mut self) -> &mut RunFlags {
        &mut self.train.run
    }
}

/// A mesh as a flag names it: `ring=2,ulysses=2`, or `off` for one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MeshFlag(pub MeshShape);

impl MeshFlag {
    /// What a person calls it.
    pub fn label(&self) -> String {
        match self.is_off() {
            true => "off".into(),
            false => self.0.to_string(),
        }
    }

    /// Whether nothing is split.
    pub fn is_off(&self) -> bool {
        self.0 == MeshShape::default()
    }
}

impl FromStr for MeshFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut mesh = MeshShape::default();
        if text == "off" {
            return Ok(Self(mesh));
        }
        for part in text.split(',') {
            let (axis, ranks) = part.split_once('=').unwrap_or((part, ""));
            let size = match axis {
                "dp" => &mut mesh.dp,
                "ring" => &mut mesh.ring,
                "ulysses" => &mut mesh.ulysses,
                "tp" => &mut mesh.tp,
                _ => {
                    return Err(format!(
                        "there is no axis {axis:?}; use off, or dp, ring, ulysses and tp as in ring=2,ulysses=2"
                    ));
                }
            };
            if *size > 1 {
                return Err(format!("{axis} is named twice"));
            }
            *size = match ranks.parse() {
                Ok(ranks) if ranks > 0 => ranks,
                _ => return Err(format!("{axis} needs a number of ranks, such as {axis}=2")),
            };
        }
        Ok(Self(mesh))
    }
}

impl fmt::Display for MeshFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_off() {
            return f.write_str("off");
        }
        let axes = Axis::ALL.iter().filter(|axis| self.0.size(**axis) > 1);
        let parts: Vec<_> = axes.map(|axis| format!("{axis}={}", self.0.size(*axis))).collect();
        f.write_str(&parts.join(","))
    }
}

impl TryFrom<String> for MeshFlag {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map_err(|error| format!("{text:?}: {error}"))
    }
}

impl From<MeshFlag> for String {
    fn from(mesh: MeshFlag) -> Self {
        mesh.to_string()
    }
}

/// The flags, checked and completed.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasureConfig {
    /// What is compared, each once.
    pub meshes: Vec<MeshFlag>,
    /// In ascending order.
    pub seq_lens: Vec<usize>,
    /// The runs of the shortest length, in the order of the meshes; then those of the next.
    pub runs: Vec<TrainConfig>,
    /// Where the page goes.
    pub page: PathBuf,
}

impl MeasureFlags {
    /// Completes the flags and checks them, for every run.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self) -> Result<MeasureConfig, InputError> {
        let page = self.page.clone().unwrap_or_else(|| "measure.html".into());
        check_output("--page", Some(&page))?;
        self.train.state.refuse("measure")?;
        for (flag, other) in [("--report", &self.train.run.report), ("--trace", &self.train.run.trace)] {
            if other.as_ref() == Some(&page) {
                return refuse(format!("--page and {flag} name the same file; use two"));
            }
        }
        let (meshes, seq_lens) = (self.meshes()?, self.seq_lens()?);
        let runs = seq_lens
            .iter()
            .flat_map(|seq_len| meshes.iter().map(|mesh| self.run(*seq_len, mesh.0).resolve()));
        Ok(MeasureConfig {
            runs: runs.collect::<Result<_, _>>()?,
            meshes,
            seq_lens,
            page,
        })
    }

    fn meshes(&self) -> Result<Vec<MeshFlag>, InputError> {
        let run = &self.train.run;
        let axes = [
            ("--dp", run.dp),
            ("--ring", run.ring),
            ("--ulysses", run.ulysses),
            ("--tp", run.tp),
        ];
        let given = match &self.meshes {
            Some(meshes) => {
                for (flag, ranks) in axes.into_iter().chain([("--ranks", run.ranks)]) {
                    if let Some(ranks) = ranks {
                        return refuse(format!(
                            "{flag} {ranks} beside --meshes: each of those names its own axes; leave one of the two out"
                        ));
                    }
                }
                meshes.clone()
            }
            None => {
                let ranks = run.ranks.unwrap_or(2);
                let on = match run.mesh()? {
                    Some(mesh) => vec![mesh],
                    None => vec![MeshShape::ulysses(ranks), MeshShape::ring(ranks), MeshShape::tp(ranks)],
                };
                [MeshShape::default()].into_iter().chain(on).map(MeshFlag).collect()
            }
        };
        let mut meshes = Vec::new();
        for mesh in given {
            if !meshes.contains(&mesh) {
                meshes.push(mesh);
            }
        }
        match meshes.is_empty() {
            true => refuse("--meshes: there is none; name one, such as ulysses=2"),
            false => Ok(meshes),
        }
    }

    fn seq_lens(&self) -> Result<Vec<usize>, InputError> {
        let mut lengths = match (&self.seq_lens, self.train.run.seq_len) {
            (Some(_), Some(longest)) => {
                return refuse(format!(
                    "--seq-len {longest} beside --seq-lens: leave one of the two out"
                ));
            }
            (Some(lengths), None) => lengths.clone(),
            (None, longest) => {
                let longest = at_least_one("--seq-len", longest, SEQ_LEN)?;
                let shorter = [longest / 4, longest / 2].into_iter().filter(|length| *length > 0);
                shorter.chain([longest]).collect()
            }
        };
        lengths.sort_unstable();
        lengths.dedup();
        match lengths.is_empty() {
            true => refuse("--seq-lens: there is none; name one, such as 1024"),
            false => Ok(lengths),
        }
    }

    /// The flags of one run.
    fn run(&self, seq_len: usize, mesh: MeshShape) -> TrainFlags {
        let run = self.train.run.clone().with_mesh(mesh);
        TrainFlags {
            run: RunFlags {
                seq_len: Some(seq_len),
                batch: run.batch.or(Some(BATCH)),
                steps: run.steps.or(Some(STEPS)),
                ..run
            },
            ..self.train.clone()
        }
    }
}

impl MeasureConfig {
    /// All that is needed to measure it again, as `--config` takes it.
    pub fn json(&self) -> Value {
        let mut config = json!(self.runs.first());
        if let Some(fields) = config.as_object_mut() {
            for one_run in ["ranks", "dp", "ring", "ulysses", "tp", "seq_len"] {
                fields.remove(one_run);
            }
            fields.insert("meshes".into(), json!(self.meshes));
            fields.insert("seq_lens".into(), json!(self.seq_lens));
        }
        config
    }
}
