//! Root mean square norm over the last dimension.

use std::mem::MaybeUninit;

use burn::backend::TensorMetadata;
use burn_std::Shape;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::checks::{self, features, row_count};

/// `(y, 1 / rms)`.
pub fn forward(x: Float, weight: Float, eps: f64) -> (Float, Float) {
    checks::norm("rms_norm", &x, &weight, None);
    by_dtype!("rms_norm", x.dtype(), forward_as(x, weight, eps))
}

/// `(dx, dweight)`.
pub fn backward(x: Float, weight: Float, inverse_rms: Float, grad: Float) -> (Float, Float) {
    let statistics = [("inverse_rms", &inverse_rms)];
    checks::norm_backward("rms_norm backward", &x, &weight, &statistics, &grad);
    by_dtype!(
        "rms_norm backward",
        x.dtype(),
        backward_as(x, weight, inverse_rms, grad)
    )
}

fn forward_as<T: Scalar>(x: Float, weight: Float, eps: f64) -> (Float, Float) {
    let (len, rows, shape) = (features("rms_norm", &x), row_count(&x), x.shape());
    let mut inverse_rms = vec![T::Acc::ZERO; rows];
    if shape.num_elements() == 0 {
        return (zeros(shape, T::dtype()), vector::<T::Acc>(&inverse_rms));
    }
    let weight = widened::<T>(&weight);
    let eps = T::Acc::of(eps);
    let rows_each = task_rows(len);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    let y = unsafe {
        replace::<T>(dense(x), len, |x, y| {
            let tasks = y
                .chunks_mut(rows_each * len)
                .zip(inverse_rms.chunks_mut(rows_each))
                .enumerate();
            run(
                tasks,
                #[inline(always)]
                |(task, (y, inverse_rms))| {
                    let (mut x_scratch, mut y_scratch) = (Vec::new(), Vec::new());
                    for (i, y) in y.chunks_exact_mut(len).enumerate() {
                        let x = x.row(task * rows_each + i, y, &mut x_scratch);
                        T::narrow(
                            y,
                            &mut y_scratch,
                            #[inline(always)]
                            |y| inverse_rms[i] = forward_row(x, &weight, eps, y),
                        );
                    }
                },
            );
        })
    };
    (y, vector::<T::Acc>(&inverse_rms))
}

fn backward_as<T: Scalar>(x: Float, weight: Float, inverse_rms: Float, grad: Float) -> (Float, Float) {
    let (len, shape) = (features("rms_norm backward", &x), x.shape());
    if shape.num_elements() == 0 {
        return (zeros(shape, T::dtype()), zeros(Shape::from([len]), T::dtype()));
    }
    let weight = widened::<T>(&weight);
    let inverse_rms = widened::<T::Acc>(&inverse_rms);
    let x = dense(x);
    let x = Rows::<T>::new(&x, len);
    let rows_each = summing_task_rows(len);
    let tasks = inverse_rms.len().div_ceil(rows_each);
    let mut dweight = vec![T::Acc::ZERO; tasks * len];
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    let dx = unsafe {
        replace::<T>(dense(grad), len, |grad, dx| {
            let tasks = dx.chunks_mut(rows_each * len).zip(dweight.chunks_mut(len)).enumerate();
            run(
                tasks,
                #[inline(always)]
                |(task, (dx, dweight))| {
                    let (mut x_scratch, mut grad_scratch, mut dx_scratch) = (Vec::new(), Vec::new(), Vec::new());
                    for (i, dx) in dx.chunks_exact_mut(len).enumerate() {
                        let row = task * rows_each + i;
                        let x = T::widen(x.row(row), &mut x_scratch);
                        let grad = grad.row(row, dx, &mut grad_scratch);
                        let mean_hn = gradient_sums(x, inverse_rms[row], grad, &weight, dweight);
                        T::narrow(
                            dx,
                            &mut dx_scratch,
                            #[inline(always)]
                            |dx| backward_row(x, inverse_rms[row], grad, &weight, mean_hn, dx),
                        );
                    }
                },
            );
        })
    };
    (dx, vector::<T>(&add_tasks(dweight, len)))
}

/// Writes the row's output and returns its `1 / rms`.
#[inline(always)]
fn forward_row<A: Real>(x: &[A], weight: &[A], eps: A, y: &mut [MaybeUninit<A>]) -> A {
    let mean_square = sum(
        x,
        #[inline(always)]
        |x| x * x,
    ) / A::of(x.len() as f64);
    let inverse_rms = A::ONE / (mean_square + eps).sqrt();
    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
        y.write(x * inverse_rms * weight);
    }
    inverse_rms
}

/// With `n` the normalised row and `h = grad * weight`: returns `mean(h * n)`, and adds `grad * n` to `dweight`.
#[inline(always)]
fn gradient_sums<A: Real>(x: &[A], inverse_rms: A, grad: &[A], weight: &[A], dweight: &mut [A]) -> A {
    let mut sum_hn = [A::ZERO; LANES];
    let mut add = |lane: usize, x: A, grad: A, weight: A, dweight: &mut A| {
        let grad_n = grad * (x * inverse_rms);
        sum_hn[lane] += grad_n * weight;
        *dweight += grad_n;
    };
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let (grad_chunks, grad_tail) = grad.as_chunks::<LANES>();
    let (weight_chunks, weight_tail) = weight.as_chunks::<LANES>();
    let (dweight_chunks, dweight_tail) = dweight.as_chunks_mut::<LANES>();
    for (((x, grad), weight), dweight) in x_chunks.iter().zip(grad_chunks).zip(weight_chunks).zip(dweight_chunks) {
        for lane in 0..LANES {
            add(lane, x[lane], grad[lane], weight[lane], &mut dweight[lane]);
        }
    }
    for lane in 0..x_tail.len() {
        add(
            lane,
            x_tail[lane],
            grad_tail[lane],
            weight_tail[lane],
            &mut dweight_tail[lane],
        );
    }
    add_lanes(sum_hn) / A::of(x.len() as f64)
}

/// `dx = (h - n * mean(h * n)) / rms`.
#[inline(always)]
fn backward_row<A: Real>(x: &[A], inverse_rms: A, grad: &[A], weight: &[A], mean_hn: A, dx: &mut [MaybeUninit<A>]) {
    for (((dx, &x), &grad), &weight) in dx.iter_mut().zip(x).zip(grad).zip(weight) {
        dx.write((grad * weight - x * inverse_rms * mean_hn) * inverse_rms);
    }
}
