//! Norms and losses of rows of any width, few and many, against naive f64 sums.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kernels_cubecl::{Kernels, layer_norm, rms_norm};

use crate::support::*;

const EPS: f64 = 1e-5;

/// `y`, `dx`, `dweight` and `dbias` of a norm; without a bias that of root mean squares.
fn naive(x: &[f64], weight: &[f64], bias: Option<&[f64]>, grad: &[f64]) -> [Vec<f64>; 4] {
    let len = weight.len();
    let (mut y, mut dx) = (Vec::new(), Vec::new());
    let (mut dweight, mut dbias) = (vec![0.0; len], vec![0.0; len]);
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / len as f64;
    for (x, grad) in x.chunks_exact(len).zip(grad.chunks_exact(len)) {
        let middle = if bias.is_some() {
            mean(&mut x.iter().copied())
        } else {
            0.0
        };
        let inverse = 1.0 / (mean(&mut x.iter().map(|x| (x - middle).powi(2))) + EPS).sqrt();
        let n: Vec<f64> = x.iter().map(|x| (x - middle) * inverse).collect();
        let h: Vec<f64> = grad.iter().zip(weight).map(|(grad, weight)| grad * weight).collect();
        let mean_h = if bias.is_some() {
            mean(&mut h.iter().copied())
        } else {
            0.0
        };
        let mean_hn = mean(&mut h.iter().zip(&n).map(|(h, n)| h * n));
        for i in 0..len {
            y.push(n[i] * weight[i] + bias.map_or(0.0, |bias| bias[i]));
            dx.push((h[i] - mean_h - n[i] * mean_hn) * inverse);
            dweight[i] += grad[i] * n[i];
            dbias[i] += grad[i];
        }
    }
    [y, dx, dweight, dbias]
}

#[test]
fn norms_of_any_width() {
    let device = device().autodiff();
    let widths = [
        1, 2, 3, 5, 31, 32, 33, 100, 255, 256, 1023, 1024, 1026, 4099, 8192, 9000, 33_000,
    ];
    let shapes = widths
        .map(|len| [5, len])
        .into_iter()
        .chain([[1, 7], [257, 64], [1000, 12], [20_000, 30]]);
    for shape in shapes {
        let [rows, len] = shape;
        let make = |seed| tensor(noise(rows * len, seed), shape, DType::F32, &device);
        let vector = |seed| tensor(noise(len, seed), [len], DType::F32, &device).require_grad();
        for with_bias in [true, false] {
            let (x, weight, bias, grad) = (make(1).require_grad(), vector(2), vector(3), make(4));
            let y = if with_bias {
                layer_norm(x.clone(), weight.clone(), bias.clone(), EPS)
            } else {
                rms_norm(x.clone(), weight.clone(), EPS)
            };
            let grads = (y.clone() * grad.clone()).sum().backward();
            let [x_values, weight_values, bias_values, grad] = [
                values(x.clone()),
                values(weight.clone()),
                values(bias.clone()),
                values(grad),
            ];
            let expected = naive(&x_values, &weight_values, with_bias.then_some(&bias_values), &grad);
            let mut found = vec![
                values(y),
                values(x.grad(&grads).unwrap()),
                values(weight.grad(&grads).unwrap()),
            ];
            found.extend(bias.grad(&grads).map(values));
            assert_eq!(found.len(), if with_bias { 4 } else { 3 });
            for ((name, found), expected) in ["y", "dx", "dweight", "dbias"].iter().zip(found).zip(expected) {
                // Rows of one or two elements normalise to their signs: their dx is the difference of equal terms.
                if *name == "dx" && len <= 2 {
                    let scale = 1.0 / EPS.sqrt();
                    let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                    assert!(
                        error.fold(0.0, f64::max) <= 1e-6 * scale,
                        "dx {shape:?}, bias {with_bias}"
                    );
                    continue;
                }
                assert_close(&format!("{name} {shape:?}, bias {with_bias}"), &found, &expected, 4e-6);
            }
        }
    }
}

#[test]
fn cross_entropy_of_any_width_and_integer_type() {
    let device = device();
    for (classes, rows, targets_dtype) in [
        (1, 3, DType::I32),
        (7, 300, DType::U32),
        (257, 5, DType::I32),
        (1024, 4, DType::U32),
        (5001, 3, DType::I32),
    ] {
        let logits = tensor(
            noise(rows * classes, 1).iter().map(|x| x * 9.0).collect(),
            [rows, classes],
            DType::F32,
            &device,
        );
        let target = |row: usize| row * 31 % classes;
        let targets = TensorData::new((0..rows).map(|row| target(row) as i32).collect(), [rows]);
        let targets = Tensor::<1, Int>::from_data(targets, (&device, targets_dtype));
        let targets = targets.try_into_primitive::<Raw>().unwrap();
        let weights = raw(tensor(vec![0.5; rows], [rows], DType::F32, &device));
        let statistics =
            Raw::cross_entropy_statistics(raw(logits.clone()), targets.clone(), weights.clone(), 0, classes);
        let found = Raw::cross_entropy_gradient(raw(logits.clone()), targets, weights, statistics.clone(), 0);
        let (logits, found, statistics) = (values(logits), values(wrap::<2>(found)), values(wrap::<2>(statistics)));
        let mut expected = Vec::new();
        for (row, logits) in logits.chunks_exact(classes).enumerate() {
            let peak = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|x| (x - peak).exp()).sum();
            assert_eq!(
                (statistics[row], statistics[2 * rows + row]),
                (peak, logits[target(row)])
            );
            assert!((statistics[rows + row] / sum - 1.0).abs() < 2e-6);
            let onehot = |class| if class == target(row) { 1.0 } else { 0.0 };
            expected.extend((logits.iter().enumerate()).map(|(i, x)| 0.5 * ((x - peak).exp() / sum - onehot(i))));
        }
        assert_close(&format!("{classes} classes"), &found, &expected, 1e-6);
    }
}

#[test]
fn a_nan_among_the_logits_makes_its_loss_nan_and_no_other() {
    let mut rows = noise(3 * 40, 1);
    rows[45] = f64::NAN;
    let logits = raw(tensor(rows, [3, 40], DType::F32, &device()));
    let targets = Tensor::<1, Int>::from_data(TensorData::new(vec![1, 2, 3], [3]), &device());
    let targets = targets.try_into_primitive::<Raw>().unwrap();
    let weights = raw(tensor(vec![1.0; 3], [3], DType::F32, &device()));
    let statistics = Raw::cross_entropy_statistics(logits, targets, weights, 0, 40);
    let sums = &values(wrap::<2>(statistics))[3..6];
    assert_eq!([0, 1, 2].map(|row| sums[row].is_nan()), [false, true, false]);
}
