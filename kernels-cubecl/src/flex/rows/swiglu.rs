//! `silu(gate) * up`.

use std::mem::MaybeUninit;

use burn::backend::TensorMetadata;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::checks;

/// `gate * sigmoid(gate) * up`.
pub fn forward(gate: Float, up: Float) -> Float {
    checks::elementwise("swiglu", ("gate", &gate), &[("up", &up)]);
    by_dtype!("swiglu", gate.dtype(), forward_as(gate, up))
}

/// `(dgate, dup)`.
pub fn backward(gate: Float, up: Float, grad: Float) -> (Float, Float) {
    checks::elementwise("swiglu backward", ("gate", &gate), &[("up", &up), ("grad", &grad)]);
    by_dtype!("swiglu backward", gate.dtype(), backward_as(gate, up, grad))
}

fn forward_as<T: Scalar>(gate: Float, up: Float) -> Float {
    let shape = gate.shape();
    if shape.num_elements() == 0 {
        return zeros(shape, T::dtype());
    }
    let (gate, up) = (dense(gate), dense(up));
    let len = block_len(&[&gate, &up]);
    let up = Rows::<T>::new(&up, len);
    let rows_each = task_rows(len);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    unsafe {
        replace::<T>(gate, len, |gate, y| {
            run(
                y.chunks_mut(rows_each * len).enumerate(),
                #[inline(always)]
                |(task, y)| {
                    let (mut gate_scratch, mut up_scratch, mut y_scratch) = (Vec::new(), Vec::new(), Vec::new());
                    for (i, y) in y.chunks_mut(len).enumerate() {
                        let row = task * rows_each + i;
                        let gate = gate.row(row, y, &mut gate_scratch);
                        let up = T::widen(up.row(row), &mut up_scratch);
                        T::narrow(
                            y,
                            &mut y_scratch,
                            #[inline(always)]
                            |y| forward_row(gate, up, y),
                        );
                    }
                },
            );
        })
    }
}

fn backward_as<T: Scalar>(gate: Float, up: Float, grad: Float) -> (Float, Float) {
    let shape = gate.shape();
    if shape.num_elements() == 0 {
        return (zeros(shape.clone(), T::dtype()), zeros(shape, T::dtype()));
    }
    let (gate, up, grad) = (dense(gate), dense(up), dense(grad));
    let len = block_len(&[&gate, &up, &grad]);
    let gate = Rows::<T>::new(&gate, len);
    let up = Rows::<T>::new(&up, len);
    let rows_each = task_rows(len);
    let mut dup = None;
    // SAFETY: the tasks cover all rows of both outputs, and each row is read whole before it is written whole.
    let dgate = unsafe {
        replace::<T>(grad, len, |grad, dgate| {
            dup = Some(build::<T>(shape, |dup| {
                let tasks = dgate
                    .chunks_mut(rows_each * len)
                    .zip(dup.chunks_mut(rows_each * len))
                    .enumerate();
                run(
                    tasks,
                    #[inline(always)]
                    |(task, (dgate, dup))| {
                        let mut scratch: [Vec<T::Acc>; 5] = Default::default();
                        let [gate_scratch, up_scratch, grad_scratch, dgate_scratch, dup_scratch] = &mut scratch;
                        for (i, (dgate, dup)) in dgate.chunks_mut(len).zip(dup.chunks_mut(len)).enumerate() {
                            let row = task * rows_each + i;
                            let gate = T::widen(gate.row(row), gate_scratch);
                            let up = T::widen(up.row(row), up_scratch);
                            let grad = grad.row(row, dgate, grad_scratch);
                            T::narrow(
                                dgate,
                                dgate_scratch,
                                #[inline(always)]
                                |dgate| {
                                    T::narrow(
                                        dup,
                                        dup_scratch,
                                        #[inline(always)]
                                        |dup| backward_row(gate, up, grad, dgate, dup),
                                    );
                                },
                            );
                        }
                    },
                );
            }));
        })
    };
    (dgate, dup.expect("built with dgate"))
}

#[inline(always)]
fn forward_row<A: Real>(gate: &[A], up: &[A], y: &mut [MaybeUninit<A>]) {
    for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
        y.write(gate * gate.sigmoid() * up);
    }
}

/// With `s = sigmoid(gate)`: `dup = grad * gate * s`, `dgate = grad * up * s * (1 + gate * (1 - s))`.
#[inline(always)]
fn backward_row<A: Real>(gate: &[A], up: &[A], grad: &[A], dgate: &mut [MaybeUninit<A>], dup: &mut [MaybeUninit<A>]) {
    for ((((dgate, dup), &gate), &up), &grad) in dgate.iter_mut().zip(dup).zip(gate).zip(up).zip(grad) {
        let s = gate.sigmoid();
        dup.write(grad * (gate * s));
        dgate.write(grad * up * (s * (A::ONE + gate * (A::ONE - s))));
    }
}
