//! Rotary position embedding.

use std::mem::MaybeUninit;

use burn::backend::TensorMetadata;

use super::{
    super::Float,
    scalar::{Real, Scalar},
    support::*,
};
use crate::{RotaryStyle, checks};

/// Turns the pairs of each head by the angles of its token, or back if `inverse`.
pub fn rotate(x: Float, cos: Float, sin: Float, style: RotaryStyle, inverse: bool) -> Float {
    checks::rotary(&x, &cos, &sin);
    by_dtype!("rotary", x.dtype(), rotate_as(x, cos, sin, style, inverse))
}

fn rotate_as<T: Scalar>(x: Float, cos: Float, sin: Float, style: RotaryStyle, inverse: bool) -> Float {
    let shape = x.shape();
    if shape.num_elements() == 0 {
        return zeros(shape, T::dtype());
    }
    let [tokens, heads, head_dim] = [shape[1], shape[2], shape[3]];
    let (cos, sin) = (dense(cos), dense(sin));
    let cos = Rows::<T::Acc>::new(&cos, head_dim / 2);
    let sin = Rows::<T::Acc>::new(&sin, head_dim / 2);
    let sign = if inverse { -T::Acc::ONE } else { T::Acc::ONE };
    let tokens_each = task_rows(heads * head_dim);
    // SAFETY: the tasks cover all rows, and each row is read whole before it is written whole.
    unsafe {
        replace::<T>(dense(x), head_dim, |x, y| {
            run(
                y.chunks_mut(tokens_each * heads * head_dim).enumerate(),
                #[inline(always)]
                |(task, y)| {
                    let (mut x_scratch, mut y_scratch) = (Vec::new(), Vec::new());
                    for (i, y) in y.chunks_exact_mut(heads * head_dim).enumerate() {
                        let token = task * tokens_each + i;
                        let (cos, sin) = (cos.row(token % tokens), sin.row(token % tokens));
                        for (head, y) in y.chunks_exact_mut(head_dim).enumerate() {
                            let x = x.row(token * heads + head, y, &mut x_scratch);
                            T::narrow(
                                y,
                                &mut y_scratch,
                                #[inline(always)]
                                |y| match style {
                                    RotaryStyle::Halves => halves(x, cos, sin, sign, y),
                                    RotaryStyle::Interleaved => interleaved(x, cos, sin, sign, y),
                                },
                            );
                        }
                    }
                },
            );
        })
    }
}

#[inline(always)]
fn halves<A: Real>(x: &[A], cos: &[A], sin: &[A], sign: A, y: &mut [MaybeUninit<A>]) {
    let (x0, x1) = x.split_at(x.len() / 2);
    let (y0, y1) = y.split_at_mut(x0.len());
    for (((((y0, y1), &x0), &x1), &cos), &sin) in y0.iter_mut().zip(y1).zip(x0).zip(x1).zip(cos).zip(sin) {
        let sin = sin * sign;
        y0.write(x0 * cos - x1 * sin);
        y1.write(x1 * cos + x0 * sin);
    }
}

#[inline(always)]
fn interleaved<A: Real>(x: &[A], cos: &[A], sin: &[A], sign: A, y: &mut [MaybeUninit<A>]) {
    let (pairs, _) = x.as_chunks::<2>();
    let (outputs, _) = y.as_chunks_mut::<2>();
    for ((([y0, y1], &[x0, x1]), &cos), &sin) in outputs.iter_mut().zip(pairs).zip(cos).zip(sin) {
        let sin = sin * sign;
        y0.write(x0 * cos - x1 * sin);
        y1.write(x1 * cos + x0 * sin);
    }
}
