//! Dropout with a regenerated mask.

use std::mem::MaybeUninit;

use burn::backend::TensorMetadata;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::{
    DropoutSpec, checks,
    dropout::{DropRule, Runs},
    philox::Philox,
};

/// `x * mask / keep`.
pub fn apply(x: Float, spec: &DropoutSpec) -> Float {
    checks::dropout(&x, spec);
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

/// The random words of the local elements, in local row-major order; the generator fills a run at a time.
struct Words {
    philox: Philox,
    runs: Runs,
}

impl Words {
    fn new(spec: &DropoutSpec) -> Self {
        Self {
            philox: Philox::new(spec.seed, spec.stream),
            runs: Runs::new(&spec.shape, &spec.positions),
        }
    }

    /// The words of the local elements from `start` on.
    #[inline(always)]
    fn fill(&self, start: usize, out: &mut [u32]) {
        let Runs { runs, slab, .. } = &self.runs;
        let mut start = start;
        let mut out = out;
        while !out.is_empty() {
            let global = self.runs.slab_start(start / slab);
            let within = start % slab;
            let next = runs.partition_point(|&(run, _)| run <= within);
            let (run, first) = runs[next - 1];
            let end = runs.get(next).map_or(*slab, |&(run, _)| run);
            let count = out.len().min(end - within);
            self.philox
                .fill(global + first + (within - run) as u64, &mut out[..count]);
            start += count;
            out = &mut out[count..];
        }
    }
}
