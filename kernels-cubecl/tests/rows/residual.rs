//! A residual connection with dropout and the norm behind it, against the three operations.

use burn::tensor::{DType, Tensor};
use kernels_cubecl::{DropoutSpec, Positions, dropout, layer_norm, residual_layer_norm, residual_rms_norm, rms_norm};

use crate::{dropout::whole, support::*};

const EPS: f64 = 1e-5;

/// Sum and norm, and the gradients of `x`, `update`, `weight` and `bias`, from gradients of both results.
fn run(
    shape: [usize; 3],
    dtype: DType,
    device: &burn::tensor::Device,
    with_bias: bool,
    operation: impl Fn([Tensor<3>; 2], Tensor<1>, Option<Tensor<1>>) -> (Tensor<3>, Tensor<3>),
) -> Vec<Vec<f64>> {
    let make = |seed| tensor(noise(shape.iter().product(), seed), shape, dtype, device);
    let vector = |seed| tensor(noise(shape[2], seed), [shape[2]], dtype, device).require_grad();
    let [x, update] = [1, 2].map(|seed| make(seed).require_grad());
    let (weight, bias) = (vector(3), with_bias.then(|| vector(4)));
    let (sum, y) = operation([x.clone(), update.clone()], weight.clone(), bias.clone());
    assert_eq!([sum.dtype(), y.dtype()], [dtype; 2]);
    let grads = ((sum.clone() * make(5)).sum() + (y.clone() * make(6)).sum()).backward();
    let mut found = vec![values(sum), values(y)];
    found.extend([x, update].map(|input| values(input.grad(&grads).unwrap())));
    found.push(values(weight.grad(&grads).unwrap()));
    found.extend(bias.map(|bias| values(bias.grad(&grads).unwrap())));
    found
}

fn specs(shape: [usize; 3]) -> [Option<DropoutSpec>; 4] {
    let [batch, tokens, features] = shape;
    let part = |positions: Positions, tokens, features: [usize; 2]| DropoutSpec {
        shape: vec![batch, tokens, features[0]],
        positions: vec![
            Positions::whole(batch),
            positions,
            Positions::new([features[1]..features[1] + shape[2]]),
        ],
        ..whole(&shape, 0.4)
    };
    let zigzag = Positions::new([2..3, 9..8 + tokens]);
    [
        None,
        Some(whole(&shape, 0.3)),
        Some(part(zigzag.clone(), tokens + 8, [features, 0])),
        Some(part(zigzag, tokens + 8, [features + 9, 5])),
    ]
}

#[test]
fn residual_norms_are_the_three_operations() {
    for dtype in dtypes() {
        for device in autodiff_devices() {
            for shape in [[2, 5, 96], [3, 7, 33], [1, 4, 1], [2, 2, 9000]] {
                for spec in specs(shape) {
                    for with_bias in [true, false] {
                        let fused = run(
                            shape,
                            dtype,
                            &device,
                            with_bias,
                            |[x, update], weight, bias| match bias {
                                Some(bias) => residual_layer_norm(x, update, spec.clone(), weight, bias, EPS),
                                None => residual_rms_norm(x, update, spec.clone(), weight, EPS),
                            },
                        );
                        let apart = run(shape, dtype, &device, with_bias, |[x, update], weight, bias| {
                            let update = match &spec {
                                Some(spec) => dropout(update, spec.clone()),
                                None => update,
                            };
                            let sum = x + update;
                            let y = match bias {
                                Some(bias) => layer_norm(sum.clone(), weight, bias, EPS),
                                None => rms_norm(sum.clone(), weight, EPS),
                            };
                            (sum, y)
                        });
                        let names = ["sum", "y", "dx", "dupdate", "dweight", "dbias"];
                        for ((name, fused), apart) in names.iter().zip(&fused).zip(&apart) {
                            let name = format!("{name}, {shape:?}, {dtype:?}, bias {with_bias}, {spec:?}");
                            if *name == *"sum" {
                                assert_eq!(fused, apart, "{name}");
                            }
                            assert_close(&name, fused, apart, 2.0 * rounding(dtype));
                        }
                        assert_eq!(fused.len(), apart.len());
                    }
                }
            }
        }
    }
}

#[test]
fn residual_norms_drop_what_dropout_drops() {
    let shape = [2, 6, 40];
    for dtype in dtypes() {
        for spec in specs(shape).into_iter().flatten() {
            let device = device();
            let make = |value: f64| tensor(vec![value; 480], shape, dtype, &device);
            let one = tensor(vec![1.0; 40], [40], dtype, &device);
            let (sum, _) = residual_rms_norm(make(0.0), make(1.0), Some(spec.clone()), one, EPS);
            assert_eq!(values(sum), values(dropout(make(1.0), spec)), "{dtype:?}");
        }
    }
}

#[test]
fn frozen_inputs_of_residual_norms_get_no_gradient() {
    for device in autodiff_devices() {
        let make = |seed, tracked: bool| {
            let x = tensor(noise(24, seed), [3, 8], DType::F32, &device);
            if tracked { x.require_grad() } else { x }
        };
        for bits in 0..8 {
            let tracked = [bits & 1 > 0, bits & 2 > 0, bits & 4 > 0];
            let (x, update) = (make(1, tracked[0]), make(2, tracked[1]));
            let weight = tensor(noise(8, 3), [8], DType::F32, &device);
            let weight = if tracked[2] { weight.require_grad() } else { weight };
            let spec = whole(&[3, 8], 0.5);
            let (_, y) = residual_rms_norm(x.clone(), update.clone(), Some(spec), weight.clone(), EPS);
            if bits == 0 {
                continue;
            }
            let grads = y.sum().backward();
            let found = [
                x.grad(&grads).is_some(),
                update.grad(&grads).is_some(),
                weight.grad(&grads).is_some(),
            ];
            assert_eq!(found, tracked);
        }
    }
}

#[test]
fn empty_residual_norms_have_gradients() {
    let device = device().autodiff();
    let x = Tensor::<2>::zeros([0, 8], &device).require_grad();
    let weight = Tensor::<1>::ones([8], &device).require_grad();
    let spec = Some(whole(&[0, 8], 0.5));
    let (sum, y) = residual_layer_norm(x.clone(), x.clone(), spec, weight.clone(), weight.clone(), EPS);
    let grads = (sum + y).sum().backward();
    assert_eq!(x.grad(&grads).unwrap().dims(), [0, 8]);
    assert_eq!(values(weight.grad(&grads).unwrap()), [0.0; 8]);
}

#[test]
#[should_panic(expected = "residual_norm: update has shape [2, 1], expected [2, 4] (x is F32 [2, 4])")]
fn residual_norms_refuse_to_broadcast() {
    let device = device();
    let weight = Tensor::<1>::ones([4], &device);
    residual_rms_norm(
        Tensor::<2>::ones([2, 4], &device),
        Tensor::ones([2, 1], &device),
        None,
        weight,
        EPS,
    );
}
