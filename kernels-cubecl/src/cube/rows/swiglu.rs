//! `silu(gate) * up`.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{ir::ElemType, prelude::*};

use super::support::*;
use crate::{
    checks,
    cube::{
        exp::sigmoid_each,
        launch::{empty, into_contiguous},
    },
};

/// `gate * sigmoid(gate) * up`.
pub fn forward(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
    checks::elementwise("swiglu", ("gate", &gate), &[("up", &up)]);
    let dtypes = dtypes("swiglu", &gate);
    let y = empty(&gate, gate.shape(), gate.dtype);
    let elements = gate.meta.num_elements();
    if elements == 0 {
        return y;
    }
    let [gate, up] = [gate, up].map(into_contiguous);
    let width = width(&gate, elements);
    let (cubes, dim) = elementwise(elements / width);
    // SAFETY: a unit beyond the last vector does nothing.
    unsafe {
        forward_kernel::launch_unchecked(
            &y.client,
            cubes,
            dim,
            address(&[&gate]),
            width,
            gate.into_buffer_arg(),
            up.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            (elements / width) as u32,
            dtypes,
        );
    }
    y
}

/// `(dgate, dup)`.
pub fn backward(gate: CubeTensor, up: CubeTensor, grad: CubeTensor) -> (CubeTensor, CubeTensor) {
    let op = "swiglu backward";
    checks::elementwise(op, ("gate", &gate), &[("up", &up), ("grad", &grad)]);
    let dtypes = dtypes(op, &gate);
    let dgate = empty(&gate, gate.shape(), gate.dtype);
    let dup = empty(&gate, gate.shape(), gate.dtype);
    let elements = gate.meta.num_elements();
    if elements == 0 {
        return (dgate, dup);
    }
    let [gate, up, grad] = [gate, up, grad].map(into_contiguous);
    let width = width(&gate, elements);
    let (cubes, dim) = elementwise(elements / width);
    // SAFETY: a unit beyond the last vector does nothing.
    unsafe {
        backward_kernel::launch_unchecked(
            &dgate.client,
            cubes,
            dim,
            address(&[&gate]),
            width,
            gate.into_buffer_arg(),
            up.into_buffer_arg(),
            grad.into_buffer_arg(),
            dgate.clone().into_buffer_arg(),
            dup.clone().into_buffer_arg(),
            (elements / width) as u32,
            dtypes,
        );
    }
    (dgate, dup)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<F: Float, A: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    vectors: u32,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= vectors as usize {
        terminate!();
    }
    let gate = Vector::<A, N>::cast_from(gate[ABSOLUTE_POS]);
    let up = Vector::<A, N>::cast_from(up[ABSOLUTE_POS]);
    y[ABSOLUTE_POS] = Vector::cast_from(gate * sigmoid_each::<A, N>(gate) * up);
}

/// With `s = sigmoid(gate)`: `dup = grad * gate * s`, `dgate = grad * up * s * (1 + gate * (1 - s))`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<F: Float, A: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    grad: &[Vector<F, N>],
    dgate: &mut [Vector<F, N>],
    dup: &mut [Vector<F, N>],
    vectors: u32,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= vectors as usize {
        terminate!();
    }
    let one = Vector::<A, N>::from_int(1);
    let gate = Vector::<A, N>::cast_from(gate[ABSOLUTE_POS]);
    let up = Vector::<A, N>::cast_from(up[ABSOLUTE_POS]);
    let grad = Vector::<A, N>::cast_from(grad[ABSOLUTE_POS]);
    let s = sigmoid_each::<A, N>(gate);
    dup[ABSOLUTE_POS] = Vector::cast_from(grad * (gate * s));
    dgate[ABSOLUTE_POS] = Vector::cast_from(grad * up * (s * (one + gate * (one - s))));
}
