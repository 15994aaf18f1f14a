//! RMS norm and layer norm, and what holds for their autodiff nodes as for all others.

use burn::tensor::{DType, Tensor};
use kernels_cubecl::{RotaryStyle, dropout, gelu, layer_norm, rms_norm, rotary, swiglu};

use crate::{dropout::whole, support::*};

#[test]
fn norms_match_pytorch() {
    let fixture = Fixture::load("norm");
    for (case, description) in fixture.description["cases"].as_object().unwrap() {
        let get = |name: &str| fixture.get(&format!("{case}.{name}"));
        let eps = description["eps"].as_f64().unwrap();
        let len = description["hidden"].as_u64().unwrap() as usize;
        let (x, grad) = (get("x").unwrap(), get("grad_out").unwrap());
        let shape = [x.len() / len, len];
        let is_layer_norm = description["kind"] == "layernorm";
        for dtype in among([DType::F32, DType::F64]) {
            for device in autodiff_devices() {
                let x = tensor(x.clone(), shape, dtype, &device).require_grad();
                let weight = get("weight").unwrap_or(vec![1.0; len]);
                let bias = get("bias").unwrap_or(vec![0.0; len]);
                let weight = tensor(weight, [len], dtype, &device).require_grad();
                let bias = tensor(bias, [len], dtype, &device).require_grad();
                let y = if is_layer_norm {
                    layer_norm(x.clone(), weight.clone(), bias.clone(), eps)
                } else {
                    rms_norm(x.clone(), weight.clone(), eps)
                };
                assert_eq!(y.dtype(), dtype);
                let grads = (y.clone() * tensor(grad.clone(), shape, dtype, &device))
                    .sum()
                    .backward();
                let dx = x.grad(&grads).unwrap();
                assert_eq!(dx.dtype(), dtype);
                let mut found = vec![("y", values(y)), ("dx", values(dx))];
                found.push(("dw", values(weight.grad(&grads).unwrap())));
                if is_layer_norm {
                    found.push(("db", values(bias.grad(&grads).unwrap())));
                }
                for (name, found) in found {
                    // A case without weights has no reference for their gradients.
                    let Some(reference) = get(&format!("{name}_f64")) else {
                        assert_eq!(case, "ln_h64_noaffine");
                        continue;
                    };
                    let tolerance = match dtype {
                        DType::F64 if case == "ln_h96_offset" => 1e-10,
                        DType::F64 => 1e-12,
                        _ => fixture.tolerance(case, name),
                    };
                    assert_close(&format!("{case}.{name} {dtype:?}"), &found, &reference, tolerance);
                }
            }
        }
    }
}

#[test]
fn layer_norm_weight_gradients_count_tokens() {
    // Row t is (t + 1) (1, -1), so it normalises to (1, -1); its gradient is t + 1: 1 + 2 + ... + 8 = 36.
    let device = device().autodiff();
    let row = |t: usize| t as f64 + 1.0;
    let x = tensor(
        (0..8).flat_map(|t| [row(t), -row(t)]).collect(),
        [8, 2],
        DType::F32,
        &device,
    )
    .require_grad();
    let grad = tensor(
        (0..8).flat_map(|t| [row(t), row(t)]).collect(),
        [8, 2],
        DType::F32,
        &device,
    );
    let weight = Tensor::<1>::ones([2], &device).require_grad();
    let bias = Tensor::<1>::zeros([2], &device).require_grad();
    let grads = (layer_norm(x, weight.clone(), bias.clone(), 1e-12) * grad)
        .sum()
        .backward();
    assert_close("dweight", &values(weight.grad(&grads).unwrap()), &[36.0, -36.0], 1e-6);
    assert_eq!(values(bias.grad(&grads).unwrap()), [36.0, 36.0]);
}

#[test]
fn frozen_inputs_get_no_gradient_and_change_no_other() {
    for device in autodiff_devices() {
        let make = |seed, tracked: bool| {
            let x = tensor(noise(6 * 8, seed), [6, 8], DType::F32, &device);
            if tracked { x.require_grad() } else { x }
        };
        let vector = |seed, tracked: bool| {
            let x = tensor(noise(8, seed), [8], DType::F32, &device);
            if tracked { x.require_grad() } else { x }
        };
        let mut whole: Option<[Vec<f64>; 3]> = None;
        for tracked in (0..8)
            .rev()
            .map(|bits: usize| [bits & 1 > 0, bits & 2 > 0, bits & 4 > 0])
        {
            let (x, up) = (make(1, tracked[0]), make(5, tracked[0]));
            let (weight, bias) = (vector(2, tracked[1]), vector(3, tracked[2]));
            let y = layer_norm(x.clone(), weight.clone(), bias.clone(), 1e-5);
            let z = rms_norm(swiglu(y, up), weight.clone(), 1e-5);
            if tracked == [false; 3] {
                assert_eq!(values(z).len(), 48);
                continue;
            }
            let grads = (z * make(4, false)).sum().backward();
            let found = [
                x.grad(&grads).map(values),
                weight.grad(&grads).map(values),
                bias.grad(&grads).map(values),
            ];
            let whole = whole.get_or_insert_with(|| found.clone().map(Option::unwrap));
            for i in 0..3 {
                assert_eq!(
                    found[i],
                    tracked[i].then(|| whole[i].clone()),
                    "tracked {tracked:?}, input {i}"
                );
            }
        }
    }
}

#[test]
fn inputs_and_gradients_that_others_hold_stay_untouched() {
    let (device, dtype) = (device().autodiff(), widest());
    let original = noise(4 * 16, 1);
    let x = tensor(original.clone(), [4, 16], dtype, &device).require_grad();
    let weight = Tensor::<1>::ones([16], (&device, dtype));
    let table = Tensor::<2>::ones([4, 8], (&device, dtype));
    let y = rms_norm(x.clone(), weight, 1e-5)
        + swiglu(x.clone(), x.clone())
        + gelu(x.clone())
        + dropout(x.clone(), whole(&[4, 16], 0.5));
    let turned = rotary(
        x.clone().reshape([1, 4, 1, 16]),
        table.clone(),
        table,
        RotaryStyle::Halves,
    );
    // The sum's gradient reaches all five nodes as one tensor.
    let all = y.clone() + turned.reshape([4, 16]);
    let grads = (all.clone() * 3.0).sum().backward();
    assert_eq!(values(x.clone()), original);
    let reference: Vec<f64> = {
        let x = tensor(original.clone(), [4, 16], dtype, &device).require_grad();
        let weight = Tensor::<1>::ones([16], (&device, dtype));
        let sum = |y: Tensor<2>| (y * 3.0).sum();
        let table = Tensor::<2>::ones([4, 8], (&device, dtype));
        let turned = rotary(
            x.clone().reshape([1, 4, 1, 16]),
            table.clone(),
            table,
            RotaryStyle::Halves,
        );
        let losses = sum(rms_norm(x.clone(), weight, 1e-5))
            + sum(swiglu(x.clone(), x.clone()))
            + sum(gelu(x.clone()))
            + sum(dropout(x.clone(), whole(&[4, 16], 0.5)))
            + sum(turned.reshape([4, 16]));
        values(x.grad(&losses.backward()).unwrap())
    };
    assert_close("dx", &values(x.grad(&grads).unwrap()), &reference, rounding(dtype));
}

#[test]
#[should_panic(expected = "layer_norm: weight has shape [3], expected [4] (x is F32 [2, 4])")]
fn layer_norm_refuses_a_weight_of_another_width() {
    let device = device();
    layer_norm(
        Tensor::<2>::ones([2, 4], &device),
        Tensor::ones([3], &device),
        Tensor::ones([4], &device),
        1e-5,
    );
}

#[test]
#[should_panic(expected = "rms_norm: weight is F32, expected BF16 (x is BF16 [2, 4]); cast it")]
fn rms_norm_refuses_mixed_dtypes() {
    let device = device();
    rms_norm(
        Tensor::<2>::ones([2, 4], (&device, DType::BF16)),
        Tensor::ones([4], (&device, DType::F32)),
        1e-5,
    );
}
