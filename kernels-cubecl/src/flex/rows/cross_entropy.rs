//! Softmax cross entropy of each row in two kernels, between which ranks that hold other classes of the same rows can be
//! asked for theirs.

use std::mem::MaybeUninit;

use burn::backend::{DType, Flex, TensorMetadata, tensor::IntTensor};
use burn_std::Shape;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::checks;

/// `[3, rows]`: largest logit, sum of exponentials of the distance from it, logit of the target.
pub fn statistics(logits: Float, targets: IntTensor<Flex>, weights: Float, first: usize, total: usize) -> Float {
    checks::cross_entropy(&logits, &targets, &weights, None);
    let targets = integers(&targets);
    by_dtype!(
        "cross_entropy",
        logits.dtype(),
        statistics_as(logits, &targets, &weights, first, total)
    )
}

/// `weight * (softmax - onehot)`.
pub fn gradient(logits: Float, targets: IntTensor<Flex>, weights: Float, statistics: Float, first: usize) -> Float {
    checks::cross_entropy(&logits, &targets, &weights, Some(&statistics));
    let targets = integers(&targets);
    by_dtype!(
        "cross_entropy",
        logits.dtype(),
        gradient_as(logits, &targets, &weights, &statistics, first)
    )
}

/// The column of a target, if it is among the classes that are here.
#[inline(always)]
fn column(target: i64, first: usize, classes: usize) -> Option<usize> {
    let column = usize::try_from(target).ok()?.checked_sub(first)?;
    (column < classes).then_some(column)
}

fn statistics_as<T: Scalar>(logits: Float, targets: &[i64], weights: &Float, first: usize, total: usize) -> Float {
    let classes = logits.shape()[1];
    let weights = widened::<T::Acc>(weights);
    let ignored = weights.iter().map(|&weight| weight == T::Acc::ZERO);
    checks::cross_entropy_targets(targets.iter().copied().zip(ignored), total);
    let rows = targets.len();
    // What an ignored row has: a loss of 0, also once several ranks' statistics are merged.
    let (mut peaks, mut sums, mut of_targets) = (
        vec![T::Acc::ZERO; rows],
        vec![T::Acc::ONE; rows],
        vec![T::Acc::ZERO; rows],
    );
    if classes == 0 {
        for row in (0..rows).filter(|row| weights[*row] != T::Acc::ZERO) {
            (peaks[row], sums[row]) = (T::Acc::NEG_INFINITY, T::Acc::ZERO);
        }
    } else if rows > 0 {
        let rows_each = task_rows(classes);
        let logits = dense(logits);
        let logits = Rows::<T>::new(&logits, classes);
        let tasks = peaks
            .chunks_mut(rows_each)
            .zip(sums.chunks_mut(rows_each))
            .zip(of_targets.chunks_mut(rows_each))
            .enumerate();
        run(
            tasks,
            #[inline(always)]
            |(task, ((peaks, sums), of_targets))| {
                let mut scratch = Vec::new();
                for i in 0..peaks.len() {
                    let row = task * rows_each + i;
                    // Not even looked at: an ignored row may hold infinities, and 0 times them is not 0.
                    if weights[row] != T::Acc::ZERO {
                        let logits = T::widen(logits.row(row), &mut scratch);
                        (peaks[i], sums[i]) = peak_and_sum(logits);
                        if let Some(column) = column(targets[row], first, classes) {
                            of_targets[i] = logits[column];
                        }
                    }
                }
            },
        );
    }
    // SAFETY: three times `rows` elements are written.
    unsafe {
        build::<T::Acc>(Shape::from([3, rows]), |out| {
            for (i, part) in [peaks, sums, of_targets].iter().enumerate() {
                out[i * rows..(i + 1) * rows].write_copy_of_slice(part);
            }
        })
    }
}

fn gradient_as<T: Scalar>(logits: Float, targets: &[i64], weights: &Float, statistics: &Float, first: usize) -> Float {
    let shape = logits.shape();
    let (rows, classes) = (shape[0], shape[1]);
    if shape.num_elements() == 0 {
        return zeros(shape, T::dtype());
    }
    let weights = widened::<T::Acc>(weights);
    let statistics = widened::<T::Acc>(statistics);
    let (peaks, sums) = (&statistics[..rows], &statistics[rows..2 * rows]);
    let rows_each = task_rows(classes);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    unsafe {
        replace::<T>(dense(logits), classes, |logits, dlogits| {
            run(
                dlogits.chunks_mut(rows_each * classes).enumerate(),
                #[inline(always)]
                |(task, dlogits)| {
                    let (mut logits_scratch, mut dlogits_scratch) = (Vec::new(), Vec::new());
                    for (i, dlogits) in dlogits.chunks_exact_mut(classes).enumerate() {
                        let row = task * rows_each + i;
                        let weight = weights[row];
                        if weight == T::Acc::ZERO {
                            dlogits.fill(MaybeUninit::zeroed());
                            continue;
                        }
                        let column = column(targets[row], first, classes);
                        let logits = logits.row(row, dlogits, &mut logits_scratch);
                        T::narrow(
                            dlogits,
                            &mut dlogits_scratch,
                            #[inline(always)]
                            |dlogits| gradient_row(logits, column, weight, peaks[row], sums[row], dlogits),
                        );
                    }
                },
            );
        })
    }
}

/// The largest logit, and the sum of `exp(logit - largest)`: 0 if every class is ruled out by a logit of negative
/// infinity.
#[inline(always)]
fn peak_and_sum<A: Real>(logits: &[A]) -> (A, A) {
    let peak = peak(logits);
    let shift = if peak == A::NEG_INFINITY { A::ZERO } else { peak };
    (peak, sum(logits, |x| (x - shift).exp()))
}

/// Writes `weight * (softmax - onehot)`.
#[inline(always)]
fn gradient_row<A: Real>(
    logits: &[A],
    column: Option<usize>,
    weight: A,
    peak: A,
    sum: A,
    dlogits: &mut [MaybeUninit<A>],
) {
    let scale = weight / sum;
    for (out, &x) in dlogits.iter_mut().zip(logits) {
        out.write((x - peak).exp() * scale);
    }
    if let Some(column) = column {
        // SAFETY: written just now.
        let at_target = unsafe { dlogits[column].assume_init_mut() };
        *at_target = *at_target - weight;
    }
}

/// The largest element; NaNs are passed over here and show up in the exponentials.
#[inline(always)]
fn peak<A: Real>(row: &[A]) -> A {
    let mut lanes = [A::NEG_INFINITY; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    lanes
        .iter()
        .chain(tail)
        .fold(A::NEG_INFINITY, |peak, &x| larger(peak, x))
}

#[inline(always)]
fn larger<A: Real>(a: A, b: A) -> A {
    if b > a { b } else { a }
}

/// Targets of any integer type.
fn integers(tensor: &IntTensor<Flex>) -> Vec<i64> {
    if tensor.layout().num_elements() == 0 {
        return Vec::new();
    }
    let tensor = tensor.to_contiguous();
    macro_rules! read {
        ($type:ty) => {
            tensor
                .as_slice::<$type>()
                .expect("contiguous")
                .iter()
                .map(|&x| x as i64)
                .collect()
        };
    }
    match tensor.dtype() {
        DType::I64 => read!(i64),
        DType::I32 => read!(i32),
        DType::I16 => read!(i16),
        DType::I8 => read!(i8),
        DType::U64 => read!(u64),
        DType::U32 => read!(u32),
        DType::U16 => read!(u16),
        DType::U8 => read!(u8),
        other => panic!("cross_entropy: targets are {other:?}, expected integers"),
    }
}
