use std::fmt;

use serde::{Deserialize, Serialize};

/// A named axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Data parallel: ranks hold different samples.
    Dp,
    /// Sequence parallel; keys and values travel between the ranks.
    Ring,
    /// Sequence parallel; tokens are exchanged for heads around attention.
    Ulysses,
    /// Tensor parallel: ranks hold slices of the weights.
    Tp,
}

impl Axis {
    /// Every axis, outermost first: ranks that differ only on the last axis are neighbours.
    pub const ALL: [Axis; 4] = [Axis::Dp, Axis::Ring, Axis::Ulysses, Axis::Tp];

    /// The axis as it is written in flags, reports and messages.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Dp => "dp",
            Axis::Ring => "ring",
            Axis::Ulysses => "ulysses",
            Axis::Tp => "tp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
