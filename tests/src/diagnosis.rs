//! From what differs to what probably went wrong: hypotheses, each confirmed by numbers where numbers can.

mod changes;
mod gradients;
mod kind;
mod loss;
mod numbers;
mod outputs;
mod probes;
mod sheet;
mod terms;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use burn_sp::layout::MeshShape;

use crate::outcome::Inputs;
use crate::run::{Detail, Run};
use crate::{Deviation, Quantity, Values};
pub use kind::FaultKind;
use numbers::{Noise, same_multiset};

/// What probably went wrong in a sharded run.
#[derive(Clone, Debug, PartialEq)]
pub struct Diagnosis {
    /// What differs first in the order of a training step: the first layer, if outputs are recorded layer by layer.
    pub first: Quantity,
    /// The parameter that is at fault, where numbers point at one; otherwise the one whose gradient differs first on the way
    /// back from the loss, if any does.
    pub parameter: Option<String>,
    /// The likely kind of fault.
    pub kind: FaultKind,
    /// The lowest rank that is off.
    pub rank: usize,
    /// What was seen, in sentences.
    pub evidence: Vec<String>,
}

impl Diagnosis {
    /// What differs does not in f64, or far less.
    pub(crate) fn rounding(first: &Deviation, evidence: String) -> Self {
        Self::of(first, FaultKind::Rounding, evidence)
    }

    /// One rank does not even repeat itself.
    pub(crate) fn unrepeated(first: &Deviation) -> Self {
        match first {
            Deviation::Value { expected, .. } if !expected.is_finite() => Self::of(
                first,
                FaultKind::Unknown,
                format!("one rank alone gives {expected}, in f64: nothing can be compared with that"),
            ),
            _ => Self::of(
                first,
                FaultKind::Random,
                "the closure run twice on one rank, in f64, gives two results: it has random numbers that no key fixes, as those of \
                 burn::nn::Dropout are"
                    .to_owned(),
            ),
        }
    }

    fn of(first: &Deviation, kind: FaultKind, evidence: String) -> Self {
        Self {
            first: first.quantity().cloned().unwrap_or(Quantity::Loss),
            parameter: None,
            kind,
            rank: first.rank().unwrap_or(0),
            evidence: vec![evidence],
        }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "likely {}, on rank {}: {}",
            self.kind,
            self.rank,
            self.evidence.join("; ")
        )?;
        write!(f, "\nfirst to differ: {}", self.first)?;
        if let Some(parameter) = &self.parameter {
            write!(f, "; parameter {parameter:?}")?;
        }
        write!(f, "\nto do: {}", self.kind.advice())
    }
}

/// Runs what was compared again.
pub(crate) trait Again {
    fn run(&self, mesh: MeshShape, inputs: &Inputs, detail: Detail) -> Result<Vec<Run>, burn_sp::Error>;

    /// The parameters that each rank starts with, made whole.
    fn parameters(&self, mesh: MeshShape) -> Result<Vec<BTreeMap<String, Values>>, burn_sp::Error>;
}

/// All that is known about a mesh on which something differs, in f64: there, rounding hides nothing.
pub(crate) struct Scene<'a> {
    pub mesh: MeshShape,
    pub truth: &'a Run,
    pub ranks: &'a [Run],
    /// In the order of a step; not empty.
    pub deviations: &'a [Deviation],
    pub inputs: &'a Inputs,
    pub again: &'a dyn Again,
    /// Whether a run with something changed failed. It may have lasted as long as the timeout: none is tried after it.
    pub failed: Cell<bool>,
}

impl Scene<'_> {
    /// Runs the closure again; None if that fails, or one did before.
    fn run(&self, mesh: MeshShape, inputs: &Inputs, detail: Detail) -> Option<Vec<Run>> {
        if self.failed.get() {
            return None;
        }
        let runs = self.again.run(mesh, inputs, detail).ok();
        self.failed.set(runs.is_none());
        runs
    }

    /// The whole parameters that one rank starts with; none if that fails.
    fn parameters(&self) -> Option<BTreeMap<String, Values>> {
        self.again.parameters(MeshShape::default()).ok()?.into_iter().next()
    }

    /// The errors of a quantity on all ranks that are off by value.
    fn noise(&self, wanted: &Quantity) -> Option<Noise> {
        let entries = self.deviations.iter().filter_map(|deviation| match deviation {
            Deviation::Value { entry, .. } if entry.quantity == *wanted => Some(entry),
            _ => None,
        });
        entries.map(|entry| Noise::of(entry)).reduce(Noise::larger)
    }

    /// The gradients that differ, from the loss backward.
    fn gradients(&self) -> Vec<&str> {
        let mut paths: Vec<&str> = Vec::new();
        for deviation in self.deviations {
            if let Some(Quantity::Gradient(path)) = deviation.quantity()
                && !paths.contains(&path.as_str())
            {
                paths.push(path);
            }
        }
        paths
    }
}

/// A kind, and what speaks for it.
struct Finding {
    kind: FaultKind,
    evidence: String,
    parameter: Option<String>,
    rank: Option<usize>,
}

impl Finding {
    fn new(kind: FaultKind, evidence: impl Into<String>) -> Self {
        Self {
            kind,
            evidence: evidence.into(),
            parameter: None,
            rank: None,
        }
    }
}

/// Names the likely fault.
pub(crate) fn diagnose(scene: &Scene<'_>) -> Diagnosis {
    let first = &scene.deviations[0];
    let quantity = first.quantity().cloned().unwrap_or(Quantity::Loss);
    let finding = other_parameters(scene)
        .or_else(|| not_finite(first))
        .or_else(|| other_bits(scene, &quantity))
        .or_else(|| match &quantity {
            Quantity::Output(name) => outputs::find(scene, name),
            Quantity::Loss => loss::find(scene),
            Quantity::Gradient(_) => gradients::find(scene),
            Quantity::InputGradient(_) => None,
            Quantity::Parameter(path) => Some(after_step(scene, path)),
        })
        .unwrap_or_else(|| Finding::new(FaultKind::Unknown, unknown(&quantity)));
    let gradient = scene.gradients().first().map(|path| (*path).to_owned());
    Diagnosis {
        first: quantity,
        parameter: finding.parameter.or(gradient),
        kind: finding.kind,
        rank: finding.rank.or(first.rank()).unwrap_or(0),
        evidence: vec![finding.evidence, extent(scene)],
    }
}

/// How much differs.
fn extent(scene: &Scene<'_>) -> String {
    let count = |group: usize| {
        let mut all: Vec<&Quantity> = scene.deviations.iter().filter_map(Deviation::quantity).collect();
        all.retain(|quantity| scene.truth.order(quantity).0 == group);
        all.dedup();
        all.len()
    };
    let loss = if count(1) > 0 { "the loss" } else { "not the loss" };
    format!(
        "{} of {} outputs differ, {loss}, and {} of {} gradients",
        count(0),
        scene.truth.outputs.len(),
        count(2),
        scene.truth.gradients.len()
    )
}

fn unknown(quantity: &Quantity) -> &'static str {
    match quantity {
        Quantity::Output(_) => "no hypothesis fits this output; the layers recorded before it are right",
        Quantity::Loss => "all recorded outputs are right, so what lies between the last of them and the loss is not",
        _ => {
            "outputs and loss are right, so a backward pass is wrong: of the layer of this parameter or one just after it"
        }
    }
}

/// Whether ranks start with other numbers than the unsharded module.
fn other_parameters(scene: &Scene<'_>) -> Option<Finding> {
    let whole = scene.parameters()?;
    let ranks = scene.again.parameters(scene.mesh).ok()?;
    scene.truth.paths.iter().find_map(|path| {
        let expected = whole.get(path)?;
        let differs = |rank: &usize| ranks[*rank].get(path).is_some_and(|found| !found.same_bits(expected));
        let rank = (0..ranks.len()).find(differs)?;
        let moved = same_multiset(&ranks[rank][path].elements, &expected.elements, 0.0);
        let (kind, how) = match moved {
            true => (FaultKind::Layout, "has its own numbers at other places"),
            false => (
                FaultKind::OtherParameters,
                "has other numbers than the unsharded module",
            ),
        };
        Some(Finding {
            parameter: Some(path.clone()),
            rank: Some(rank),
            ..Finding::new(
                kind,
                format!("before the step, parameter {path:?} on rank {rank} {how}"),
            )
        })
    })
}

/// No hypothesis is about what is no number.
fn not_finite(first: &Deviation) -> Option<Finding> {
    match first {
        Deviation::Value {
            rank,
            index,
            found,
            expected,
            ..
        } if !found.is_finite() && expected.is_finite() => Some(Finding::new(
            FaultKind::Unknown,
            format!("rank {rank} has {found} at {index:?}, one rank alone {expected}"),
        )),
        _ => None,
    }
}

/// Every rank is right, but they are not alike bit for bit. (Parameters after a step: see there.)
fn other_bits(scene: &Scene<'_>, quantity: &Quantity) -> Option<Finding> {
    let mut of_first = scene
        .deviations
        .iter()
        .filter(|other| other.quantity() == Some(quantity));
    let bits = of_first.all(|deviation| matches!(deviation, Deviation::Ranks { .. }));
    (bits && !matches!(quantity, Quantity::Parameter(_))).then(|| {
        let evidence = format!(
            "{quantity} is right, but does not have the same bits on all ranks, which will drift apart: sum in one order, or let all take \
             one rank's"
        );
        Finding::new(FaultKind::Unknown, evidence)
    })
}

/// The step's gradients are right, and the parameters after it are not.
fn after_step(scene: &Scene<'_>, path: &str) -> Finding {
    let unequal = scene.deviations.iter().find_map(|deviation| match deviation {
        Deviation::Ranks {
            rank,
            quantity: Quantity::Parameter(_),
            ..
        } => Some(*rank),
        _ => None,
    });
    match unequal {
        Some(rank) => Finding {
            parameter: Some(path.to_owned()),
            rank: Some(rank),
            ..Finding::new(
                FaultKind::Diverging,
                format!(
                    "all gradients are right and alike, but after the step {path:?} is not the same on rank {rank} as on rank 0"
                ),
            )
        },
        None => Finding {
            parameter: Some(path.to_owned()),
            ..Finding::new(
                FaultKind::Unknown,
                "all gradients are right, and all ranks have the same wrong parameters after the step: the optimizer got something else",
            )
        },
    }
}
