//! GELU by its tanh approximation.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{ir::ElemType, prelude::*};

use super::support::*;
use crate::{
    checks,
    cube::{
        exp::{exp_each, sigmoid_each},
        launch::{empty, into_contiguous},
    },
    gelu::{CUBIC, LINEAR},
};

/// `x * sigmoid(LINEAR x + CUBIC x^3)`.
pub fn forward(x: CubeTensor) -> CubeTensor {
    let dtypes = dtypes("gelu", &x);
    let y = empty(&x, x.shape(), x.dtype);
    let elements = x.meta.num_elements();
    if elements == 0 {
        return y;
    }
    let x = into_contiguous(x);
    let width = width(&x, elements);
    let (cubes, dim) = elementwise(elements / width);
    // SAFETY: a unit beyond the last vector does nothing.
    unsafe {
        forward_kernel::launch_unchecked(
            &y.client,
            cubes,
            dim,
            address(&[&x]),
            width,
            x.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            factors(dtypes[1]),
            (elements / width) as u32,
            dtypes,
        );
    }
    y
}

/// `dx`.
pub fn backward(x: CubeTensor, grad: CubeTensor) -> CubeTensor {
    let op = "gelu backward";
    checks::elementwise(op, ("x", &x), &[("grad", &grad)]);
    let dtypes = dtypes(op, &x);
    let dx = empty(&x, x.shape(), x.dtype);
    let elements = x.meta.num_elements();
    if elements == 0 {
        return dx;
    }
    let [x, grad] = [x, grad].map(into_contiguous);
    let width = width(&x, elements);
    let (cubes, dim) = elementwise(elements / width);
    // SAFETY: a unit beyond the last vector does nothing.
    unsafe {
        backward_kernel::launch_unchecked(
            &dx.client,
            cubes,
            dim,
            address(&[&x]),
            width,
            x.into_buffer_arg(),
            grad.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            factors(dtypes[1]),
            (elements / width) as u32,
            dtypes,
        );
    }
    dx
}

/// [`LINEAR`] and [`CUBIC`]; as arguments, for literals of kernels are f32.
#[derive(CubeType, CubeLaunch)]
struct Factors {
    linear: InputScalar,
    cubic: InputScalar,
}

fn factors(dtype: ElemType) -> FactorsLaunch {
    FactorsLaunch::new(InputScalar::new(LINEAR, dtype), InputScalar::new(CUBIC, dtype))
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    factors: &Factors,
    vectors: u32,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= vectors as usize {
        terminate!();
    }
    let linear = Vector::<A, N>::new(factors.linear.get::<A>());
    let cubic = Vector::<A, N>::new(factors.cubic.get::<A>());
    let x = Vector::<A, N>::cast_from(x[ABSOLUTE_POS]);
    y[ABSOLUTE_POS] = Vector::cast_from(x * sigmoid_each::<A, N>(x * (linear + cubic * (x * x))));
}

/// With `z = LINEAR x + CUBIC x^3` and `s = sigmoid(z)`: `dx = grad * (s + x * s * (1 - s) * dz)`. Both factors come
/// from `e^-|z|`: taking `s` from 1 would lose digits, and `x * dz` makes much of the loss.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    grad: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    factors: &Factors,
    vectors: u32,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= vectors as usize {
        terminate!();
    }
    let linear = Vector::<A, N>::new(factors.linear.get::<A>());
    let cubic = Vector::<A, N>::new(factors.cubic.get::<A>());
    let x = Vector::<A, N>::cast_from(x[ABSOLUTE_POS]);
    let grad = Vector::<A, N>::cast_from(grad[ABSOLUTE_POS]);
    let (zero, one) = (Vector::<A, N>::from_int(0), Vector::<A, N>::from_int(1));
    let square = x * x;
    let z = x * (linear + cubic * square);
    let e = exp_each::<A, N>(-z.abs());
    let inverse = one / (one + e);
    let s = select_many(z.less_than(&zero), e, one) * inverse;
    // Where the sigmoid no longer changes, the square may be infinite.
    let change = e * inverse * inverse * x * (linear + Vector::from_int(3) * cubic * square);
    let change = select_many(e.equal(&zero), zero, change);
    dx[ABSOLUTE_POS] = Vector::cast_from(grad * (s + change));
}
