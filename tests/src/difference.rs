use std::fmt;

use burn_sp::layout::MeshShape;

use crate::Diagnosis;

/// What was compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantity {
    /// The loss.
    Loss,
    /// A named output.
    Output(String),
    /// The gradient of a named input, summed over the ranks.
    InputGradient(String),
    /// The gradient of a parameter, by the parameter's path.
    Gradient(String),
    /// A parameter that was handed in with [`Outcome::parameters`](crate::Outcome::parameters), by its path.
    Parameter(String),
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Quantity::Loss => f.write_str("the loss"),
            Quantity::Output(name) => write!(f, "output {name:?}"),
            Quantity::InputGradient(name) => write!(f, "the gradient of input {name:?}"),
            Quantity::Gradient(path) => write!(f, "the gradient of parameter {path:?}"),
            Quantity::Parameter(path) => write!(f, "parameter {path:?}"),
        }
    }
}

/// A sharded run is not the unsharded one: in what, and what probably went wrong.
#[derive(Debug)]
pub struct Difference {
    /// Everything that differs, of all ranks and meshes; by mesh, then in the order of a training step: outputs as the
    /// closure recorded them, the loss, gradients of parameters from the loss backward (the module's last parameter first),
    /// gradients of inputs, parameters after the step. Never empty.
    pub deviations: Vec<Deviation>,
    /// The likely fault on the first mesh that differs. None if a run failed: its report says what happened.
    pub diagnosis: Option<Box<Diagnosis>>,
}

impl Difference {
    /// The first thing that differs.
    pub fn first(&self) -> &Deviation {
        &self.deviations[0]
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first())?;
        match &self.diagnosis {
            Some(diagnosis) => write!(f, "\n{diagnosis}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Difference {}

/// One thing in which a sharded run is not the unsharded one.
#[derive(Debug, thiserror::Error)]
pub enum Deviation {
    /// One rank failed in f64, by which all others are measured.
    #[error(
        "on one rank, in f64: {error}\nthe closure has to run in f64 too, on Flex: make constants in Rank::dtype(). Burn's RotaryEncoding \
         and PositionalEncoding keep f32 tables whatever the module's dtype is; burn_sp::nn::Rotary makes its table in any"
    )]
    Reference {
        /// The report.
        error: burn_sp::Error,
    },
    /// Ranks failed.
    #[error("on {mesh}: {error}")]
    Failed {
        /// The mesh.
        mesh: MeshShape,
        /// The report.
        error: burn_sp::Error,
    },
    /// One run has what another lacks.
    #[error("on {mesh}, rank {rank}: {quantity} is {}", if *.expected { "missing" } else { "there, but not on one rank" })]
    Presence {
        /// The mesh.
        mesh: MeshShape,
        /// The rank.
        rank: usize,
        /// What it is.
        quantity: Quantity,
        /// Whether one rank has it.
        expected: bool,
    },
    /// Shape or dtype differ.
    #[error("on {mesh}, rank {rank}: {quantity} is {found}, on one rank {expected}")]
    Kind {
        /// The mesh.
        mesh: MeshShape,
        /// The rank.
        rank: usize,
        /// What differs.
        quantity: Quantity,
        /// Its shape and dtype.
        found: String,
        /// Those of one rank.
        expected: String,
    },
    /// Two ranks should hold the same bits.
    #[error("on {mesh}: {quantity} has other bits on rank {rank} than on rank 0")]
    Ranks {
        /// The mesh.
        mesh: MeshShape,
        /// The rank.
        rank: usize,
        /// What differs.
        quantity: Quantity,
    },
    /// Values are further from f64 than the rule allows.
    #[error(
        "on {mesh}, rank {rank}: {} is off by {:.3e} (root mean square, against f64; {:.3e} are allowed, one rank is off by \
         {:.3e}); worst at {index:?}: {found} where f64 has {expected}", .entry.quantity, .entry.error, .entry.allowed,
         .entry.single
    )]
    Value {
        /// The mesh.
        mesh: MeshShape,
        /// The rank.
        rank: usize,
        /// What differs, and by how much.
        entry: Box<Entry>,
        /// Where in the whole tensor the error is largest.
        index: Vec<usize>,
        /// What stands there.
        found: f64,
        /// What should.
        expected: f64,
    },
}

impl Deviation {
    /// The mesh; one rank, if that failed.
    pub fn mesh(&self) -> MeshShape {
        match self {
            Deviation::Reference { .. } => MeshShape::default(),
            Deviation::Failed { mesh, .. }
            | Deviation::Presence { mesh, .. }
            | Deviation::Kind { mesh, .. }
            | Deviation::Ranks { mesh, .. }
            | Deviation::Value { mesh, .. } => *mesh,
        }
    }

    /// The rank, unless all failed together.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Deviation::Reference { .. } | Deviation::Failed { .. } => None,
            Deviation::Presence { rank, .. }
            | Deviation::Kind { rank, .. }
            | Deviation::Ranks { rank, .. }
            | Deviation::Value { rank, .. } => Some(*rank),
        }
    }

    /// What differs.
    pub fn quantity(&self) -> Option<&Quantity> {
        match self {
            Deviation::Reference { .. } | Deviation::Failed { .. } => None,
            Deviation::Presence { quantity, .. }
            | Deviation::Kind { quantity, .. }
            | Deviation::Ranks { quantity, .. } => Some(quantity),
            Deviation::Value { entry, .. } => Some(&entry.quantity),
        }
    }
}

/// How far one quantity is from f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// What was compared.
    pub quantity: Quantity,
    /// Root mean square error of the sharded run (of its worst rank) against f64 on one rank; absolute, in the unit of
    /// the quantity itself.
    pub error: f64,
    /// The same error of one rank in the dtype of the sharded run.
    pub single: f64,
    /// How large the rule allows the error to be.
    pub allowed: f64,
}

/// A comparison in which everything agreed.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Each mesh with all that was compared on it.
    pub meshes: Vec<(MeshShape, Vec<Entry>)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (mesh, entries) in &self.meshes {
            let share = |entry: &&Entry| {
                if entry.allowed > 0.0 {
                    entry.error / entry.allowed
                } else {
                    0.0
                }
            };
            let worst = entries.iter().max_by(|a, b| share(a).total_cmp(&share(b)));
            write!(f, "{mesh}: {} quantities agree", entries.len())?;
            if let Some(worst) = worst {
                write!(
                    f,
                    ", the worst uses {:.0} % of its tolerance: {}",
                    100.0 * share(&worst),
                    worst.quantity
                )?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
