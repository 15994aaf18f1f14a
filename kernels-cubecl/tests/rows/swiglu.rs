//! SwiGLU.

use burn::tensor::Tensor;
use kernels_cubecl::{Kernels, swiglu};

use crate::support::*;

#[test]
fn swiglu_matches_a_naive_reference() {
    for dtype in dtypes() {
        for device in autodiff_devices() {
            let shape = [7, 321];
            let scaled = |seed, scale: f64| noise(7 * 321, seed).iter().map(|x| x * scale).collect();
            let gate = tensor(scaled(1, 5.0), shape, dtype, &device).require_grad();
            let up = tensor(scaled(2, 1.0), shape, dtype, &device).require_grad();
            let grad = tensor(scaled(3, 1.0), shape, dtype, &device);
            let y = swiglu(gate.clone(), up.clone());
            let grads = (y.clone() * grad.clone()).sum().backward();
            let (dgate, dup) = (gate.grad(&grads).unwrap(), up.grad(&grads).unwrap());
            assert_eq!([y.dtype(), dgate.dtype(), dup.dtype()], [dtype; 3]);
            let (gate, up, grad) = (values(gate), values(up), values(grad));
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let each = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
                (0..gate.len()).map(|i| f(gate[i], up[i], grad[i])).collect()
            };
            let tolerance = rounding(dtype);
            assert_close("y", &values(y), &each(&|g, u, _| g * sigmoid(g) * u), tolerance);
            assert_close("dup", &values(dup), &each(&|g, _, d| d * g * sigmoid(g)), tolerance);
            let slope = |g: f64| sigmoid(g) * (1.0 + g * (1.0 - sigmoid(g)));
            assert_close("dgate", &values(dgate), &each(&|g, u, d| d * u * slope(g)), tolerance);
        }
    }
}

#[test]
fn swiglu_saturates_cleanly() {
    let device = device();
    for dtype in dtypes() {
        let gate = vec![-1000.0, -100.0, -90.0, -88.0, 0.0, 88.0, 100.0, 1000.0];
        let gate = raw(tensor(gate, [8], dtype, &device));
        let ones = || raw(tensor(vec![1.0; 8], [8], dtype, &device));
        let y = values(wrap::<1>(Raw::swiglu_forward(gate.clone(), ones())));
        let expected = [0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 100.0, 1000.0];
        assert_close("y", &y, &expected, 1e-7);
        let (dgate, dup) = Raw::swiglu_backward(gate, ones(), ones());
        assert_close("dup", &values(wrap::<1>(dup)), &y, 0.0);
        let expected = [0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0];
        assert_close("dgate", &values(wrap::<1>(dgate)), &expected, 1e-7);
    }
}

#[test]
#[should_panic(expected = "swiglu: up has shape [4, 2], expected [2, 4] (gate is F32 [2, 4])")]
fn swiglu_refuses_other_shapes() {
    let device = device();
    swiglu(Tensor::<2>::ones([2, 4], &device), Tensor::ones([4, 2], &device));
}
