//! Softmax cross entropy of each row, with its gradient.

use std::mem::MaybeUninit;

use burn::backend::{DType, Flex, TensorMetadata, tensor::IntTensor};

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};

/// `(losses, dlogits)`.
pub fn forward_backward(logits: Float, targets: IntTensor<Flex>, weights: Float) -> (Float, Float) {
    let op = "cross_entropy";
    let shape = logits.shape();
    let &[rows, _] = shape.as_slice() else {
        panic!(
            "{op}: logits have shape {:?}, expected [rows, classes]; flatten the dimensions before the classes",
            shape.as_slice()
        );
    };
    let why = format!("logits are {:?} {:?}", logits.dtype(), shape.as_slice());
    expect(op, "targets", &targets, &[rows], targets.dtype(), &why);
    expect(op, "weights", &weights, &[rows], accumulation(logits.dtype()), &why);
    let targets = integers(&targets);
    by_dtype!(
        "cross_entropy",
        logits.dtype(),
        forward_backward_as(logits, targets, weights)
    )
}

fn forward_backward_as<T: Scalar>(logits: Float, targets: Vec<i64>, weights: Float) -> (Float, Float) {
    let shape = logits.shape();
    let classes = shape[1];
    let weights = widened::<T::Acc>(&weights);
    for (row, (&target, &weight)) in targets.iter().zip(&weights).enumerate() {
        assert!(
            weight == T::Acc::ZERO || usize::try_from(target).is_ok_and(|target| target < classes),
            "cross_entropy: target {target} of row {row} is not among the {classes} classes; give an ignored row \
             weight 0"
        );
    }
    let mut losses = vec![T::Acc::ZERO; targets.len()];
    if shape.num_elements() == 0 {
        return (vector::<T::Acc>(&losses), zeros(shape, T::dtype()));
    }
    let rows_each = task_rows(classes);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    let dlogits = unsafe {
        replace::<T>(dense(logits), classes, |logits, dlogits| {
            let tasks = dlogits
                .chunks_mut(rows_each * classes)
                .zip(losses.chunks_mut(rows_each))
                .enumerate();
            run(
                tasks,
                #[inline(always)]
                |(task, (dlogits, losses))| {
                    let (mut logits_scratch, mut dlogits_scratch) = (Vec::new(), Vec::new());
                    for (i, dlogits) in dlogits.chunks_exact_mut(classes).enumerate() {
                        let row = task * rows_each + i;
                        if weights[row] == T::Acc::ZERO {
                            // Not even looked at: an ignored row may hold infinities, and 0 times them is not 0.
                            dlogits.fill(MaybeUninit::zeroed());
                            continue;
                        }
                        let logits = logits.row(row, dlogits, &mut logits_scratch);
                        T::narrow(
                            dlogits,
                            &mut dlogits_scratch,
                            #[inline(always)]
                            |dlogits| losses[i] = loss_row(logits, targets[row] as usize, weights[row], dlogits),
                        );
                    }
                },
            );
        })
    };
    (vector::<T::Acc>(&losses), dlogits)
}

/// Writes `weight * (softmax - onehot)` and returns `weight * (log-sum-exp - logit of the target)`.
///
/// One exponential an element: the first pass leaves it in the output, the second scales it.
#[inline(always)]
fn loss_row<A: Real>(logits: &[A], target: usize, weight: A, dlogits: &mut [MaybeUninit<A>]) -> A {
    let peak = peak(logits);
    let mut sums = [A::ZERO; LANES];
    let (chunks, tail) = logits.as_chunks::<LANES>();
    let (out_chunks, out_tail) = dlogits.as_chunks_mut::<LANES>();
    for (out, x) in out_chunks.iter_mut().zip(chunks) {
        for lane in 0..LANES {
            sums[lane] += *out[lane].write((x[lane] - peak).exp());
        }
    }
    for ((out, &x), sum) in out_tail.iter_mut().zip(tail).zip(&mut sums) {
        *sum += *out.write((x - peak).exp());
    }
    let sum = add_lanes(sums);
    // SAFETY: written just now.
    let dlogits = unsafe { &mut *(std::ptr::from_mut(dlogits) as *mut [A]) };
    let scale = weight / sum;
    for out in dlogits.iter_mut() {
        *out = *out * scale;
    }
    dlogits[target] = dlogits[target] - weight;
    weight * (sum.ln() + (peak - logits[target]))
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
