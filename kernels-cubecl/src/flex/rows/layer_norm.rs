//! Layer norm over the last dimension.

use std::mem::MaybeUninit;

use burn::backend::TensorMetadata;
use burn_std::Shape;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::checks::{self, features, row_count};

/// `(y, mean, 1 / std)`.
pub fn forward(x: Float, weight: Float, bias: Float, eps: f64) -> (Float, Float, Float) {
    checks::norm("layer_norm", &x, &weight, Some(&bias));
    by_dtype!("layer_norm", x.dtype(), forward_as(x, weight, bias, eps))
}

/// `(dx, dweight, dbias)`.
pub fn backward(x: Float, weight: Float, mean: Float, inverse_std: Float, grad: Float) -> (Float, Float, Float) {
    let statistics = [("mean", &mean), ("inverse_std", &inverse_std)];
    checks::norm_backward("layer_norm backward", &x, &weight, &statistics, &grad);
    by_dtype!(
        "layer_norm backward",
        x.dtype(),
        backward_as(x, weight, mean, inverse_std, grad)
    )
}

fn forward_as<T: Scalar>(x: Float, weight: Float, bias: Float, eps: f64) -> (Float, Float, Float) {
    let (len, rows, shape) = (features("layer_norm", &x), row_count(&x), x.shape());
    let mut mean = vec![T::Acc::ZERO; rows];
    let mut inverse_std = vec![T::Acc::ZERO; rows];
    if shape.num_elements() == 0 {
        return (
            zeros(shape, T::dtype()),
            vector::<T::Acc>(&mean),
            vector::<T::Acc>(&inverse_std),
        );
    }
    let (weight, bias) = (widened::<T>(&weight), widened::<T>(&bias));
    let eps = T::Acc::of(eps);
    let rows_each = task_rows(len);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    let y = unsafe {
        replace::<T>(dense(x), len, |x, y| {
            let tasks = y
                .chunks_mut(rows_each * len)
                .zip(mean.chunks_mut(rows_each))
                .zip(inverse_std.chunks_mut(rows_each))
                .enumerate();
            run(
                tasks,
                #[inline(always)]
                |(task, ((y, mean), inverse_std))| {
                    let (mut x_scratch, mut y_scratch) = (Vec::new(), Vec::new());
                    for (i, y) in y.chunks_exact_mut(len).enumerate() {
                        let x = x.row(task * rows_each + i, y, &mut x_scratch);
                        T::narrow(
                            y,
                            &mut y_scratch,
                            #[inline(always)]
                            |y| (mean[i], inverse_std[i]) = forward_row(x, &weight, &bias, eps, y),
                        );
                    }
                },
            );
        })
    };
    (y, vector::<T::Acc>(&mean), vector::<T::Acc>(&inverse_std))
}

fn backward_as<T: Scalar>(
    x: Float,
    weight: Float,
    mean: Float,
    inverse_std: Float,
    grad: Float,
) -> (Float, Float, Float) {
    let (len, shape) = (features("layer_norm backward", &x), x.shape());
    if shape.num_elements() == 0 {
        let sums = || zeros(Shape::from([len]), T::dtype());
        return (zeros(shape, T::dtype()), sums(), sums());
    }
    let weight = widened::<T>(&weight);
    let mean = widened::<T::Acc>(&mean);
    let inverse_std = widened::<T::Acc>(&inverse_std);
    let x = dense(x);
    let x = Rows::<T>::new(&x, len);
    let rows_each = summing_task_rows(len);
    let tasks = mean.len().div_ceil(rows_each);
    let mut sums = vec![T::Acc::ZERO; tasks * 2 * len];
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    let dx = unsafe {
        replace::<T>(dense(grad), len, |grad, dx| {
            let tasks = dx.chunks_mut(rows_each * len).zip(sums.chunks_mut(2 * len)).enumerate();
            run(
                tasks,
                #[inline(always)]
                |(task, (dx, sums))| {
                    let (dweight, dbias) = sums.split_at_mut(len);
                    let (mut x_scratch, mut grad_scratch, mut dx_scratch) = (Vec::new(), Vec::new(), Vec::new());
                    for (i, dx) in dx.chunks_exact_mut(len).enumerate() {
                        let row = task * rows_each + i;
                        let grad = grad.row(row, dx, &mut grad_scratch);
                        let row = Row {
                            x: T::widen(x.row(row), &mut x_scratch),
                            mean: mean[row],
                            inverse_std: inverse_std[row],
                        };
                        let means = row.gradient_sums(grad, &weight, dweight, dbias);
                        T::narrow(
                            dx,
                            &mut dx_scratch,
                            #[inline(always)]
                            |dx| row.backward(grad, &weight, means, dx),
                        );
                    }
                },
            );
        })
    };
    let sums = add_tasks(sums, 2 * len);
    (dx, vector::<T>(&sums[..len]), vector::<T>(&sums[len..]))
}

/// Writes the row's output and returns its mean and `1 / std`.
///
/// Centres the row before it squares: `E[x^2] - E[x]^2` cancels when the mean is large.
#[inline(always)]
fn forward_row<A: Real>(x: &[A], weight: &[A], bias: &[A], eps: A, y: &mut [MaybeUninit<A>]) -> (A, A) {
    let features = A::of(x.len() as f64);
    let mean = sum(
        x,
        #[inline(always)]
        |x| x,
    ) / features;
    let variance = sum(
        x,
        #[inline(always)]
        |x| (x - mean) * (x - mean),
    ) / features;
    let inverse_std = A::ONE / (variance + eps).sqrt();
    for (((y, &x), &weight), &bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
        y.write((x - mean) * inverse_std * weight + bias);
    }
    (mean, inverse_std)
}

/// A row of the input with its statistics.
#[derive(Clone, Copy)]
struct Row<'a, A> {
    x: &'a [A],
    mean: A,
    inverse_std: A,
}

impl<A: Real> Row<'_, A> {
    #[inline(always)]
    fn normalised(&self, x: A) -> A {
        (x - self.mean) * self.inverse_std
    }

    /// With `n` the normalised row and `h = grad * weight`: returns the means of `h` and `h * n`, and adds `grad * n`
    /// to `dweight` and `grad` to `dbias`.
    #[inline(always)]
    fn gradient_sums(self, grad: &[A], weight: &[A], dweight: &mut [A], dbias: &mut [A]) -> (A, A) {
        let mut sum_h = [A::ZERO; LANES];
        let mut sum_hn = [A::ZERO; LANES];
        let mut add = |lane: usize, x: A, grad: A, weight: A, dweight: &mut A, dbias: &mut A| {
            let n = self.normalised(x);
            let h = grad * weight;
            sum_h[lane] += h;
            sum_hn[lane] += h * n;
            *dweight += grad * n;
            *dbias += grad;
        };
        let (x_chunks, x_tail) = self.x.as_chunks::<LANES>();
        let (grad_chunks, grad_tail) = grad.as_chunks::<LANES>();
        let (weight_chunks, weight_tail) = weight.as_chunks::<LANES>();
        let (dweight_chunks, dweight_tail) = dweight.as_chunks_mut::<LANES>();
        let (dbias_chunks, dbias_tail) = dbias.as_chunks_mut::<LANES>();
        let inputs = x_chunks.iter().zip(grad_chunks).zip(weight_chunks);
        for (((x, grad), weight), (dweight, dbias)) in inputs.zip(dweight_chunks.iter_mut().zip(dbias_chunks)) {
            for lane in 0..LANES {
                add(
                    lane,
                    x[lane],
                    grad[lane],
                    weight[lane],
                    &mut dweight[lane],
                    &mut dbias[lane],
                );
            }
        }
        for lane in 0..x_tail.len() {
            let (dweight, dbias) = (&mut dweight_tail[lane], &mut dbias_tail[lane]);
            add(lane, x_tail[lane], grad_tail[lane], weight_tail[lane], dweight, dbias);
        }
        let features = A::of(self.x.len() as f64);
        (add_lanes(sum_h) / features, add_lanes(sum_hn) / features)
    }

    /// `dx = (h - mean(h) - n * mean(h * n)) / std`.
    #[inline(always)]
    fn backward(self, grad: &[A], weight: &[A], (mean_h, mean_hn): (A, A), dx: &mut [MaybeUninit<A>]) {
        for (((dx, &x), &grad), &weight) in dx.iter_mut().zip(self.x).zip(grad).zip(weight) {
            dx.write((grad * weight - mean_h - self.normalised(x) * mean_hn) * self.inverse_std);
        }
    }
}
