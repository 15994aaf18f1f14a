//! Rotary embedding, both ways to pair elements.

use burn::tensor::{DType, Tensor};
use kernels_cubecl::{RotaryStyle, rotary};

use crate::support::*;

#[test]
fn rotary_matches_a_naive_reference() {
    let [batch, tokens, heads, dim] = [2, 5, 3, 12];
    let half = dim / 2;
    let angle = |token: usize, i: usize| token as f64 * 0.7 / (1.0 + i as f64);
    let angles = || (0..tokens).flat_map(|t| (0..half).map(move |i| angle(t, i)));
    for style in [RotaryStyle::Halves, RotaryStyle::Interleaved] {
        for dtype in dtypes() {
            for device in autodiff_devices() {
                let table = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
                // Tracked tables are treated as constants.
                let cos = tensor(angles().map(f64::cos).collect(), [tokens, half], table, &device).require_grad();
                let sin = tensor(angles().map(f64::sin).collect(), [tokens, half], table, &device);
                let shape = [batch, tokens, heads, dim];
                let x = tensor(noise(batch * tokens * heads * dim, 1), shape, dtype, &device).require_grad();
                let grad = tensor(noise(batch * tokens * heads * dim, 2), shape, dtype, &device);
                let y = rotary(x.clone(), cos.clone(), sin, style);
                let grads = (y.clone() * grad.clone()).sum().backward();
                let dx = x.grad(&grads).unwrap();
                assert_eq!([y.dtype(), dx.dtype()], [dtype; 2]);
                let turn = |x: &[f64], sign: f64| {
                    let mut y = x.to_vec();
                    for row in 0..batch * tokens * heads {
                        for i in 0..half {
                            let (a, b) = match style {
                                RotaryStyle::Halves => (i, i + half),
                                RotaryStyle::Interleaved => (2 * i, 2 * i + 1),
                            };
                            let (a, b) = (row * dim + a, row * dim + b);
                            let (sin, cos) = (sign * angle(row / heads % tokens, i)).sin_cos();
                            y[a] = x[a] * cos - x[b] * sin;
                            y[b] = x[b] * cos + x[a] * sin;
                        }
                    }
                    y
                };
                assert_close("y", &values(y), &turn(&values(x), 1.0), rounding(dtype));
                assert_close("dx", &values(dx), &turn(&values(grad), -1.0), rounding(dtype));
            }
        }
    }
}

#[test]
#[should_panic(expected = "rotary: head_dim is 5, expected an even number")]
fn rotary_refuses_an_odd_head() {
    let device = device();
    let table = Tensor::<2>::ones([2, 2], &device);
    rotary(
        Tensor::ones([1, 2, 1, 5], &device),
        table.clone(),
        table,
        RotaryStyle::Halves,
    );
}

#[test]
#[should_panic(expected = "rotary: cos has shape [3, 2], expected [2, 2] (x is F32 [1, 2, 1, 4])")]
fn rotary_refuses_a_table_of_other_tokens() {
    let device = device();
    let table = Tensor::<2>::ones([3, 2], &device);
    rotary(
        Tensor::ones([1, 2, 1, 4], &device),
        table.clone(),
        table,
        RotaryStyle::Halves,
    );
}
