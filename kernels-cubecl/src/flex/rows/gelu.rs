//! GELU by its tanh approximation.

use std::mem::MaybeUninit;

use burn::backend::TensorMetadata;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::{
    checks,
    gelu::{CUBIC, LINEAR},
};

/// `x * sigmoid(LINEAR x + CUBIC x^3)`.
pub fn forward(x: Float) -> Float {
    by_dtype!("gelu", x.dtype(), forward_as(x))
}

/// `dx`.
pub fn backward(x: Float, grad: Float) -> Float {
    checks::elementwise("gelu backward", ("x", &x), &[("grad", &grad)]);
    by_dtype!("gelu backward", x.dtype(), backward_as(x, grad))
}

fn forward_as<T: Scalar>(x: Float) -> Float {
    let shape = x.shape();
    if shape.num_elements() == 0 {
        return zeros(shape, T::dtype());
    }
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
                    for (i, y) in y.chunks_mut(len).enumerate() {
                        let x = x.row(task * rows_each + i, y, &mut x_scratch);
                        T::narrow(
                            y,
                            &mut y_scratch,
                            #[inline(always)]
                            |y| forward_row(x, y),
                        );
                    }
                },
            );
        })
    }
}

fn backward_as<T: Scalar>(x: Float, grad: Float) -> Float {
    let shape = x.shape();
    if shape.num_elements() == 0 {
        return zeros(shape, T::dtype());
    }
    let (x, grad) = (dense(x), dense(grad));
    let len = block_len(&[&x, &grad]);
    let x = Rows::<T>::new(&x, len);
    let rows_each = task_rows(len);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    unsafe {
        replace::<T>(grad, len, |grad, dx| {
            run(
                dx.chunks_mut(rows_each * len).enumerate(),
                #[inline(always)]
                |(task, dx)| {
                    let (mut x_scratch, mut grad_scratch, mut dx_scratch) = (Vec::new(), Vec::new(), Vec::new());
                    for (i, dx) in dx.chunks_mut(len).enumerate() {
                        let row = task * rows_each + i;
                        let x = T::widen(x.row(row), &mut x_scratch);
                        let grad = grad.row(row, dx, &mut grad_scratch);
                        T::narrow(
                            dx,
                            &mut dx_scratch,
                            #[inline(always)]
                            |dx| backward_row(x, grad, dx),
                        );
                    }
                },
            );
        })
    }
}

#[inline(always)]
fn forward_row<A: Real>(x: &[A], y: &mut [MaybeUninit<A>]) {
    let (linear, cubic) = (A::of(LINEAR), A::of(CUBIC));
    for (y, &x) in y.iter_mut().zip(x) {
        y.write(x * (x * (linear + cubic * (x * x))).sigmoid());
    }
}

/// With `z = LINEAR x + CUBIC x^3` and `s = sigmoid(z)`: `dx = grad * (s + x * s * (1 - s) * dz)`. Both factors come
/// from `e^-|z|`: taking `s` from 1 would lose digits, and `x * dz` makes much of the loss.
#[inline(always)]
fn backward_row<A: Real>(x: &[A], grad: &[A], dx: &mut [MaybeUninit<A>]) {
    let (linear, cubic, cubic_slope) = (A::of(LINEAR), A::of(CUBIC), A::of(3.0 * CUBIC));
    for ((dx, &x), &grad) in dx.iter_mut().zip(x).zip(grad) {
        let square = x * x;
        let z = x * (linear + cubic * square);
        let e = (if z > A::ZERO { -z } else { z }).exp();
        let inverse = A::ONE / (A::ONE + e);
        let s = if z < A::ZERO { e * inverse } else { inverse };
        // Where the sigmoid no longer changes, the square may be infinite.
        let change = if e == A::ZERO {
            A::ZERO
        } else {
            e * inverse * inverse * x * (linear + cubic_slope * square)
        };
        dx.write(grad * (s + change));
    }
}
