//! Dropout with a regenerated mask.

use std::mem::MaybeUninit;

use burn::backend::TensorMetadata;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::{
    DropoutSpec, Positions,
    dropout::{self, DropRule},
    philox::Philox,
};

/// `x * mask / keep`.
pub fn apply(x: Float, spec: &DropoutSpec) -> Float {
    let shape = x.shape();
    let positions: Vec<&Positions> = spec.positions.iter().collect();
    dropout::check(spec.probability, &spec.shape, &positions, shape.as_slice())
        .unwrap_or_else(|wrong| panic!("dropout: {wrong} (x is {:?} {:?})", x.dtype(), shape.as_slice()));
    by_dtype!("dropout", x.dtype(), apply_as(x, spec))
}

fn apply_as<T: Scalar>(x: Float, spec: &DropoutSpec) -> Float {
    let shape = x.shape();
    if shape.num_elements() == 0 {
        return zeros(shape, T::dtype());
    }
    let Some(rule) = DropRule::new(spec.probability) else {
        return x.to_contiguous();
    };
    let words = Words::new(spec);
    let x = dense(x);
    let len = block_len(&[&x]);
    let rows_each = task_rows(len);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    unsafe {
        replace::<T>(x, len, |x, y| {
            run(
                y.chunks_mut(rows_each * len).enumerate(),
                #[inline(always)]
                |(task, y)| {
                    let (mut x_scratch, mut y_scratch) = (Vec::new(), Vec::new());
                    let mut random = vec![0; len];
                    for (i, y) in y.chunks_mut(len).enumerate() {
                        let row = task * rows_each + i;
                        let random = &mut random[..y.len()];
                        words.fill(row * len, random);
                        let x = x.row(row, y, &mut x_scratch);
                        T::narrow(
                            y,
                            &mut y_scratch,
                            #[inline(always)]
                            |y| drop_row(x, random, rule, y),
                        );
                    }
                },
            );
        })
    }
}

#[inline(always)]
fn drop_row<A: Real>(x: &[A], random: &[u32], rule: DropRule, y: &mut [MaybeUninit<A>]) {
    let scale = A::of(rule.scale);
    for ((y, &x), &word) in y.iter_mut().zip(x).zip(random) {
        y.write(if rule.keeps(word) { x * scale } else { A::ZERO });
    }
}

/// The random words of the local elements, in local row-major order.
///
/// Trailing dimensions held whole, and the ranges of the dimension before them, are runs of consecutive global
/// indices; the generator fills a run at a time.
struct Words {
    philox: Philox,
    /// For each dimension before the runs, the global index at which each local position starts.
    outer: Vec<Vec<u64>>,
    /// Where each run starts in a local slab, and its global index there; a slab is one position of all of `outer`.
    runs: Vec<(usize, u64)>,
    slab: usize,
}

impl Words {
    fn new(spec: &DropoutSpec) -> Self {
        let dims = spec.shape.len();
        let whole = |dim: usize| {
            let mut next = 0;
            spec.positions[dim].ranges().iter().all(|range| {
                let joins = range.start == next;
                next = range.end;
                joins
            }) && next == spec.shape[dim]
        };
        // The last dimension held in part, and how many elements lie behind one of its positions.
        let mut split = dims;
        let mut inner = 1;
        while split > 0 {
            split -= 1;
            if !whole(split) {
                break;
            }
            if split > 0 {
                inner *= spec.shape[split];
            }
        }
        let mut runs = Vec::new();
        let mut slab = 0;
        let mut outer = Vec::new();
        if dims == 0 {
            runs.push((0, 0));
            slab = 1;
        } else {
            for range in spec.positions[split].ranges() {
                runs.push((slab, (range.start * inner) as u64));
                slab += range.len() * inner;
            }
            let mut stride = (inner * spec.shape[split]) as u64;
            for dim in (0..split).rev() {
                outer.push(
                    spec.positions[dim]
                        .iter()
                        .map(|position| position as u64 * stride)
                        .collect(),
                );
                stride *= spec.shape[dim] as u64;
            }
        }
        Self {
            philox: Philox::new(spec.seed, spec.stream),
            outer,
            runs,
            slab,
        }
    }

    /// The words of the local elements from `start` on.
    #[inline(always)]
    fn fill(&self, start: usize, out: &mut [u32]) {
        let mut start = start;
        let mut out = out;
        while !out.is_empty() {
            let mut rest = start / self.slab;
            let mut global = 0;
            for starts in &self.outer {
                global += starts[rest % starts.len()];
                rest /= starts.len();
            }
            let within = start % self.slab;
            let next = self.runs.partition_point(|&(run, _)| run <= within);
            let (run, first) = self.runs[next - 1];
            let end = self.runs.get(next).map_or(self.slab, |&(run, _)| run);
            let count = out.len().min(end - within);
            self.philox
                .fill(global + first + (within - run) as u64, &mut out[..count]);
            start += count;
            out = &mut out[count..];
        }
    }
}
