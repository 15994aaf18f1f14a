//! The spans that a timeline shows: one while a rank posts a collective, one while it waits for the results.

use crate::{Collective, Site};
use tracing::Span;

/// What a rank does in a call: named after the operation, with the call's number in its group, the payload that leaves
/// the rank, and the place in the user's program. It costs nothing unless someone listens at the level `TRACE`.
pub(crate) fn span(op: &Collective, phase: &'static str, axis: &str, call: u64, bytes: usize, site: Site) -> Span {
    // A span's name must be known when the program is compiled.
    macro_rules! named {
        ($name:literal) => {
            tracing::trace_span!($name, phase, axis, call, bytes, at = %site)
        };
    }
    match op {
        Collective::AllGather { .. } => named!("all_gather"),
        Collective::ReduceScatter { .. } => named!("reduce_scatter"),
        Collective::AllReduce => named!("all_reduce"),
        Collective::AllToAll { .. } => named!("all_to_all"),
        Collective::Shift { .. } => named!("shift"),
        Collective::Broadcast { .. } => named!("broadcast"),
        Collective::Barrier => named!("barrier"),
    }
}
