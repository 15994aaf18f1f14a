//! Results that are the same on all ranks, made once by all of them.

use crate::Buffer;
use crate::copy::{Output, Target, write};
use crate::plan::{Plan, Tile};
use burn_std::DType;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The size of one piece of work: large against the cost of claiming it, small enough to share the work evenly.
const PIECE_BYTES: usize = 1 << 20;

/// The results of one call, in the making.
///
/// Whoever waits claims pieces until none is left. Nobody has a share of its own, so a rank that comes late, or sits
/// on a busy core, holds up no one.
pub(super) struct Joint {
    pieces: Vec<(usize, Tile)>,
    targets: Vec<Target>,
    claimed: AtomicUsize,
    written: AtomicUsize,
    /// Keeps the memory behind `targets` until the last piece is written.
    outputs: Mutex<Vec<(Output, Vec<usize>)>>,
    results: OnceLock<Vec<Buffer>>,
}

impl Joint {
    /// From one plan and dtype per transfer.
    pub fn new(plans: impl IntoIterator<Item = (Plan, DType)>) -> Self {
        let (mut pieces, mut targets, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        for (transfer, (plan, dtype)) in plans.into_iter().enumerate() {
            let plan = plan.cut(PIECE_BYTES / dtype.size());
            let mut output = Output::new(&plan.shape, dtype);
            targets.push(output.target());
            outputs.push((output, plan.shape));
            pieces.extend(plan.tiles.into_iter().map(|tile| (transfer, tile)));
        }
        let joint = Joint {
            pieces,
            targets,
            claimed: AtomicUsize::new(0),
            written: AtomicUsize::new(0),
            outputs: Mutex::new(outputs),
            results: OnceLock::new(),
        };
        if joint.pieces.is_empty() {
            joint.finish();
        }
        joint
    }

    /// Works until no piece is left to claim. `tensors` by rank, then by transfer. Returns whether this call wrote the
    /// last piece.
    pub fn work(&self, tensors: &[Arc<Vec<Buffer>>]) -> bool {
        let mut last = false;
        // Relaxed: a claim orders nothing, it only must be unique.
        while let Some((transfer, tile)) = self.pieces.get(self.claimed.fetch_add(1, Ordering::Relaxed)) {
            let sources: Vec<_> = tensors.iter().map(|tensors| tensors.get(*transfer)).collect();
            // SAFETY: the pieces are disjoint and each is claimed once; the output lives in `outputs` until all are
            // written.
            unsafe { write(tile, &sources, &self.targets[*transfer]) };
            // Releases what was written, and acquires what the others wrote for the one that finishes.
            if self.written.fetch_add(1, Ordering::AcqRel) + 1 == self.pieces.len() {
                self.finish();
                last = true;
            }
        }
        last
    }

    fn finish(&self) {
        let outputs = std::mem::take(&mut *self.outputs.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: called once, after the last piece: the pieces cover the results, as a plan's tiles do.
        let finish = |(output, shape): (Output, Vec<usize>)| unsafe { output.finish(shape) };
        // Set only here, so it cannot be set already.
        let _ = self.results.set(outputs.into_iter().map(finish).collect());
    }

    /// The results, once the last piece is written.
    pub fn results(&self) -> Option<&Vec<Buffer>> {
        self.results.get()
    }
}
