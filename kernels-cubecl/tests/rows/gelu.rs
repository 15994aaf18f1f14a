//! GELU by its tanh approximation.

use burn::tensor::DType;
use kernels_cubecl::{Kernels, gelu};

use crate::support::*;

#[test]
fn gelu_matches_a_naive_reference() {
    for dtype in dtypes() {
        for device in autodiff_devices() {
            let shape = [7, 321];
            let scaled = |seed, scale: f64| noise(7 * 321, seed).iter().map(|x| x * scale).collect();
            let x = tensor(scaled(1, 3.0), shape, dtype, &device).require_grad();
            let grad = tensor(scaled(2, 1.0), shape, dtype, &device);
            let y = gelu(x.clone());
            let grads = (y.clone() * grad.clone()).sum().backward();
            let dx = x.grad(&grads).unwrap();
            assert_eq!([y.dtype(), dx.dtype()], [dtype; 2]);
            let (x, grad) = (values(x), values(grad));
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = |x: f64| (root * (x + 0.044715 * x.powi(3))).tanh();
            let expected: Vec<f64> = x.iter().map(|&x| 0.5 * x * (1.0 + tanh(x))).collect();
            assert_close("y", &values(y), &expected, rounding(dtype));
            let slope = |x: f64| {
                let inner = root * (1.0 + 3.0 * 0.044715 * x * x);
                0.5 * (1.0 + tanh(x)) + 0.5 * x * (1.0 - tanh(x).powi(2)) * inner
            };
            let expected: Vec<f64> = x.iter().zip(&grad).map(|(&x, d)| d * slope(x)).collect();
            assert_close("dx", &values(dx), &expected, rounding(dtype));
        }
    }
}

#[test]
fn gelu_is_that_of_pytorch() {
    // torch.nn.functional.gelu(x, approximate="tanh"), from the tests of burn-nn.
    let x = tensor(vec![-1.0, 0.0, 1.0, 0.5, -0.5, 2.0], [6], DType::F32, &device());
    let expected = [
        -0.1588079929,
        0.0,
        0.8411920071,
        0.3457140028,
        -0.1542859972,
        1.9545977116,
    ];
    assert_close("y", &values(gelu(x)), &expected, 1e-6);
}

#[test]
fn gelu_saturates_exactly_where_its_cube_overflows_too() {
    let device = device();
    for dtype in dtypes() {
        let large = match dtype {
            DType::F64 => 1e200,
            DType::F16 => 6e4,
            _ => 1e20,
        };
        let x = tensor(
            vec![-large, -100.0, -30.0, 0.0, 30.0, 100.0, large],
            [7],
            dtype,
            &device,
        );
        let ones = raw(tensor(vec![1.0; 7], [7], dtype, &device));
        let positive: Vec<f64> = values(x.clone()).iter().map(|x| x.max(0.0)).collect();
        let x = raw(x);
        let y = values(wrap::<1>(Raw::gelu_tanh_forward(x.clone())));
        assert_eq!(y, positive, "{dtype:?}");
        let dx = values(wrap::<1>(Raw::gelu_tanh_backward(x, ones)));
        assert_eq!(dx, [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0], "{dtype:?}");
    }
}

#[test]
fn gelu_keeps_nan_where_it_is() {
    for dtype in dtypes() {
        let mut numbers = noise(40, 1);
        numbers[13] = f64::NAN;
        let x = raw(tensor(numbers, [40], dtype, &device()));
        let ones = raw(tensor(vec![1.0; 40], [40], dtype, &device()));
        let y = values(wrap::<1>(Raw::gelu_tanh_forward(x.clone())));
        let dx = values(wrap::<1>(Raw::gelu_tanh_backward(x, ones)));
        for found in [y, dx] {
            let nan: Vec<usize> = (0..40).filter(|&i| found[i].is_nan()).collect();
            assert_eq!(nan, [13], "{dtype:?}");
        }
    }
}
