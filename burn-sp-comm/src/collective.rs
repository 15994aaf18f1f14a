//! The operations.

use crate::Parts;
use serde::{Deserialize, Serialize};

/// What a collective does with one tensor.
///
/// "Own" refers to the [`Parts`]: the input or output has that dimension's own ranges, in local order. Sums are taken
/// in rank order, and f16 and bf16 are added up in f32 and rounded once, so every run gives the same bits. Booleans
/// are or-ed, integers wrap.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Collective {
    /// Own slice of `dim` -> whole `dim`, in ascending global order. Where parts overlap, the lowest rank's copy is
    /// taken.
    AllGather {
        /// The dimension that becomes whole.
        dim: usize,
        /// Who brings what.
        parts: Parts,
    },
    /// Whole `dim` on every rank -> own slice of `dim`, summed over the ranks.
    ReduceScatter {
        /// The dimension that gets split.
        dim: usize,
        /// Who keeps what.
        parts: Parts,
    },
    /// Same shape everywhere -> the sum, the same bits on every rank.
    AllReduce,
    /// Own `gather_parts` of `gather_dim` and whole `scatter_dim` -> whole `gather_dim` and own `scatter_parts` of
    /// `scatter_dim`.
    ///
    /// With `gather_dim == scatter_dim`, that one dimension is split anew: own `gather_parts` -> own `scatter_parts`.
    /// Where `gather_parts` overlap, the contributions are added; where `scatter_parts` overlap, an element goes to
    /// several ranks.
    AllToAll {
        /// The dimension that becomes whole.
        gather_dim: usize,
        /// Who brings what of it.
        gather_parts: Parts,
        /// The dimension that gets split.
        scatter_dim: usize,
        /// Who keeps what of it.
        scatter_parts: Parts,
    },
    /// The tensor goes to rank + `by`, the one of rank - `by` comes in (both modulo the size). Shapes may differ per
    /// rank.
    Shift {
        /// How far, in ranks of the group; may be negative or larger than the group.
        by: isize,
    },
    /// Every rank gets `root`'s tensor. The others pass any buffer, an empty one is fine; its shape and dtype are
    /// ignored.
    Broadcast {
        /// The sender, a rank within the group.
        root: usize,
    },
    /// Nobody goes on before all have come. The buffer is returned as it is.
    Barrier,
}

impl Collective {
    /// The name used in reports and counters: `"all_gather"`, `"reduce_scatter"`, ...
    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllGather { .. } => "all_gather",
            Collective::ReduceScatter { .. } => "reduce_scatter",
            Collective::AllReduce => "all_reduce",
            Collective::AllToAll { .. } => "all_to_all",
            Collective::Shift { .. } => "shift",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Barrier => "barrier",
        }
    }

    /// The parameters in words, for a report on ranks whose parameters differ; empty where there are none.
    pub fn parameters(&self) -> String {
        match self {
            Collective::AllGather { dim, parts } | Collective::ReduceScatter { dim, parts } => {
                format!("(dim {dim}, parts {})", ranges(parts))
            }
            Collective::AllToAll {
                gather_dim,
                gather_parts,
                scatter_dim,
                scatter_parts,
            } => format!(
                "(gathers dim {gather_dim}, parts {}; scatters dim {scatter_dim}, parts {})",
                ranges(gather_parts),
                ranges(scatter_parts)
            ),
            Collective::Shift { by } => format!("(by {by})"),
            Collective::Broadcast { root } => format!("(root {root})"),
            Collective::AllReduce | Collective::Barrier => String::new(),
        }
    }

    /// The one rank whose tensor `rank` receives unchanged, for the operations that only hand tensors over; both are
    /// ranks within a group of `size`.
    ///
    /// # Panics
    /// If a shift is asked about in a group of no ranks.
    pub fn sender(&self, rank: usize, size: usize) -> Option<usize> {
        match self {
            Collective::Shift { by } => {
                let back = by.rem_euclid(size as isize) as usize;
                Some((rank + size - back) % size)
            }
            Collective::Broadcast { root } => Some(*root),
            Collective::Barrier => Some(rank),
            _ => None,
        }
    }

    /// The dimension whose length depends on the rank in this operation's input, if there is one.
    pub(crate) fn varying_dim(&self) -> Option<usize> {
        match self {
            Collective::AllGather { dim, .. } => Some(*dim),
            Collective::AllToAll { gather_dim, .. } => Some(*gather_dim),
            _ => None,
        }
    }
}

/// `[0..2 6..8 | 2..6]`
fn ranges(parts: &Parts) -> String {
    let rank = |rank| {
        parts
            .of(rank)
            .iter()
            .map(|range| format!("{range:?}"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    format!("[{}]", (0..parts.ranks()).map(rank).collect::<Vec<_>>().join(" | "))
}
