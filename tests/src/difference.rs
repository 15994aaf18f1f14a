use std::fmt;

use burn_sp::layout::MeshShape;

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
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Quantity::Loss => f.write_str("the loss"),
            Quantity::Output(name) => write!(f, "output {name:?}"),
            Quantity::InputGradient(name) => write!(f, "the gradient of input {name:?}"),
            Quantity::Gradient(path) => write!(f, "the gradient of parameter {path:?}"),
        }
    }
}

/// The first thing in which a sharded run is not the unsharded one.
#[derive(Debug, thiserror::Error)]
pub enum Difference {
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

/// How far one quantity is from f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// What was compared.
    pub quantity: Quantity,
    /// Root mean square error of the sharded run (of its worst rank) against f64 on one rank.
    pub error: f64,
    /// The same of one rank in the dtype of the sharded run.
    pub single: f64,
    /// What the rule allows.
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
