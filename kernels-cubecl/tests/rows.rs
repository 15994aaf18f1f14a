//! The row-wise kernels on Flex, and their gradients, against PyTorch fixtures and naive f64 references.
#![cfg(feature = "flex")]

use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kernels_cubecl::{
    DropoutSpec, Kernels, Positions, RotaryStyle, dropout, layer_norm, philox::Philox, rms_norm, rotary, swiglu,
};
use safetensors::{Dtype, SafeTensors};

type Float = burn::backend::tensor::FloatTensor<Flex>;

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

// ---------------------------------------------------------------------------------------------------------------
// Helpers
// ---------------------------------------------------------------------------------------------------------------

/// Numbers in about (-2, 2), the same in every run.
fn noise(len: usize, seed: u64) -> Vec<f64> {
    let mut words = vec![0; len];
    Philox::new(seed, 0).fill(0, &mut words);
    words
        .iter()
        .map(|&word| f64::from(word) / f64::from(u32::MAX) * 4.0 - 2.0)
        .collect()
}

fn tensor<const D: usize>(values: Vec<f64>, shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, dtype))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().try_to_vec().unwrap()
}

fn raw<const D: usize>(tensor: Tensor<D>) -> Float {
    tensor.try_into_primitive::<Flex>().unwrap()
}

fn wrap<const D: usize>(tensor: Float) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(tensor)
}

fn autodiff_devices() -> [Device; 2] {
    [
        Device::flex().autodiff(),
        Device::flex().autodiff().gradient_checkpointing(),
    ]
}

/// Largest error relative to the largest reference value.
fn error_to_peak(found: &[f64], reference: &[f64]) -> f64 {
    assert_eq!(found.len(), reference.len());
    let peak = reference.iter().fold(0.0f64, |peak, x| peak.max(x.abs()));
    let error = found.iter().zip(reference).map(|(a, b)| (a - b).abs());
    error.fold(0.0f64, |worst, e| if e > worst || e.is_nan() { e } else { worst }) / peak.max(1e-30)
}

#[track_caller]
fn assert_close(name: &str, found: &[f64], reference: &[f64], tolerance: f64) {
    let error = error_to_peak(found, reference);
    assert!(
        error <= tolerance,
        "{name}: error {error:.3e} of the peak, allowed {tolerance:.3e}"
    );
}

/// A few units in the last place of the dtype, relative to a peak.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 1e-6,
        // One rounding: half a unit in the last place of 8 and 11 bits.
        DType::BF16 => 1.01 / 256.0,
        DType::F16 => 1.01 / 2048.0,
        other => panic!("{other:?}"),
    }
}

struct Fixture {
    bytes: Vec<u8>,
    description: serde_json::Value,
}

impl Fixture {
    fn load(family: &str) -> Self {
        let path = |extension| {
            format!(
                "{}/tests/fixtures/{family}/{family}.{extension}",
                env!("CARGO_MANIFEST_DIR")
            )
        };
        Self {
            bytes: std::fs::read(path("safetensors")).unwrap(),
            description: serde_json::from_slice(&std::fs::read(path("json")).unwrap()).unwrap(),
        }
    }

    fn get(&self, name: &str) -> Option<Vec<f64>> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = tensors.tensor(name).ok()?;
        let words = |size| view.data().chunks_exact(size);
        Some(match view.dtype() {
            Dtype::F32 => words(4)
                .map(|x| f32::from_le_bytes(x.try_into().unwrap()).into())
                .collect(),
            Dtype::F64 => words(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect(),
            Dtype::I64 => words(8)
                .map(|x| i64::from_le_bytes(x.try_into().unwrap()) as f64)
                .collect(),
            other => panic!("{name}: {other:?}"),
        })
    }

    fn tolerance(&self, case: &str, name: &str) -> f64 {
        self.description["cases"][case]["tolerances"][name]["suggested_rel_to_peak"]
            .as_f64()
            .unwrap()
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Norms
// ---------------------------------------------------------------------------------------------------------------

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
        for dtype in [DType::F32, DType::F64] {
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
    let device = Device::flex().autodiff();
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
    let device = Device::flex().autodiff();
    let original = noise(4 * 16, 1);
    let x = tensor(original.clone(), [4, 16], DType::F64, &device).require_grad();
    let weight = Tensor::<1>::ones([16], (&device, DType::F64));
    let table = Tensor::<2>::ones([4, 8], (&device, DType::F64));
    let y = rms_norm(x.clone(), weight, 1e-5) + swiglu(x.clone(), x.clone()) + dropout(x.clone(), whole(&[4, 16], 0.5));
    let turned = rotary(
        x.clone().reshape([1, 4, 1, 16]),
        table.clone(),
        table,
        RotaryStyle::Halves,
    );
    // The sum's gradient reaches all four nodes as one tensor.
    let all = y.clone() + turned.reshape([4, 16]);
    let grads = (all.clone() * 3.0).sum().backward();
    assert_eq!(values(x.clone()), original);
    let reference: Vec<f64> = {
        let x = tensor(original.clone(), [4, 16], DType::F64, &device).require_grad();
        let weight = Tensor::<1>::ones([16], (&device, DType::F64));
        let sum = |y: Tensor<2>| (y * 3.0).sum();
        let table = Tensor::<2>::ones([4, 8], (&device, DType::F64));
        let turned = rotary(
            x.clone().reshape([1, 4, 1, 16]),
            table.clone(),
            table,
            RotaryStyle::Halves,
        );
        let losses = sum(rms_norm(x.clone(), weight, 1e-5))
            + sum(swiglu(x.clone(), x.clone()))
            + sum(dropout(x.clone(), whole(&[4, 16], 0.5)))
            + sum(turned.reshape([4, 16]));
        values(x.grad(&losses.backward()).unwrap())
    };
    assert_close("dx", &values(x.grad(&grads).unwrap()), &reference, 1e-14);
}

// ---------------------------------------------------------------------------------------------------------------
// SwiGLU and rotary
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn swiglu_matches_a_naive_reference() {
    for dtype in DTYPES {
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
    let device = Device::flex();
    let gate = vec![-1000.0, -100.0, -90.0, -88.0, 0.0, 88.0, 100.0, 1000.0];
    let gate = raw(tensor(gate, [8], DType::F32, &device));
    let ones = || raw(tensor(vec![1.0; 8], [8], DType::F32, &device));
    let y = values(wrap::<1>(Flex::swiglu_forward(gate.clone(), ones())));
    assert_close("y", &y, &[0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 100.0, 1000.0], 1e-7);
    let (dgate, dup) = Flex::swiglu_backward(gate, ones(), ones());
    assert_close("dup", &values(wrap::<1>(dup)), &y, 0.0);
    assert_close(
        "dgate",
        &values(wrap::<1>(dgate)),
        &[0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0],
        1e-7,
    );
}

#[test]
fn rotary_matches_a_naive_reference() {
    let [batch, tokens, heads, dim] = [2, 5, 3, 12];
    let half = dim / 2;
    let angle = |token: usize, i: usize| token as f64 * 0.7 / (1.0 + i as f64);
    let angles = || (0..tokens).flat_map(|t| (0..half).map(move |i| angle(t, i)));
    for style in [RotaryStyle::Halves, RotaryStyle::Interleaved] {
        for dtype in DTYPES {
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

// ---------------------------------------------------------------------------------------------------------------
// Cross entropy
// ---------------------------------------------------------------------------------------------------------------

/// `(peaks, sums, logits of the targets)` of each row, and the gradient given these or others.
fn cross_entropy_parts(
    logits: Tensor<2>,
    targets: &[f64],
    weights: &[f64],
    classes: Range<usize>,
    total: usize,
    merged: Option<[Vec<f64>; 3]>,
) -> ([Vec<f64>; 3], Vec<f64>) {
    let device = Device::flex();
    let dtype = if logits.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let rows = targets.len();
    let targets: Vec<i64> = targets.iter().map(|&target| target as i64).collect();
    let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [rows]), &device)
        .try_into_primitive::<Flex>()
        .unwrap();
    let weights = raw(tensor(weights.to_vec(), [rows], dtype, &device));
    let input = logits.dtype();
    let logits = raw(logits);
    let own = Flex::cross_entropy_statistics(logits.clone(), targets.clone(), weights.clone(), classes.start, total);
    let statistics = match merged {
        Some(merged) => raw(tensor(merged.concat(), [3, rows], dtype, &device)),
        None => own.clone(),
    };
    let dlogits = Flex::cross_entropy_gradient(logits, targets, weights, statistics, classes.start);
    let (own, dlogits) = (wrap::<2>(own), wrap::<2>(dlogits));
    assert_eq!((own.dtype(), dlogits.dtype()), (dtype, input));
    let own = values(own);
    let own = [0, 1, 2].map(|part| own[part * rows..(part + 1) * rows].to_vec());
    (own, values(dlogits))
}

fn losses([peaks, sums, of_targets]: &[Vec<f64>; 3], weights: &[f64]) -> Vec<f64> {
    (0..weights.len())
        .map(|row| weights[row] * (sums[row].ln() + (peaks[row] - of_targets[row])))
        .collect()
}

/// Losses and the gradient of the logits, all classes at once.
fn cross_entropy(logits: Tensor<2>, targets: &[f64], weights: Vec<f64>) -> (Vec<f64>, Vec<f64>) {
    let classes = logits.dims()[1];
    let (statistics, dlogits) = cross_entropy_parts(logits, targets, &weights, 0..classes, classes, None);
    (losses(&statistics, &weights), dlogits)
}

/// Ranks hold other classes of the same rows, one of them none; a row is ignored, and a class is ruled out.
#[test]
fn classes_in_parts_are_the_classes_at_once() {
    let (rows, total) = (4, 10);
    let mut logits: Vec<f64> = noise(rows * total, 3).iter().map(|x| x * 5.0).collect();
    // The first part of row 1 is ruled out as a whole, and row 2 is far from the others.
    logits[total..total + 3].fill(f64::NEG_INFINITY);
    logits[2 * total..3 * total].iter_mut().for_each(|x| *x += 300.0);
    let (targets, weights) = ([2.0, 9.0, 3.0, -100.0], [1.0, 0.5, 2.0, 0.0]);
    for dtype in [DType::F64, DType::F32] {
        let part = |classes: Range<usize>| {
            let values = (0..rows).flat_map(|row| logits[row * total..][classes.clone()].to_vec());
            tensor(values.collect(), [rows, classes.len()], dtype, &Device::flex())
        };
        let parts = [0..3, 3..3, 3..9, 9..10];
        let run = |classes: &Range<usize>, merged| {
            cross_entropy_parts(
                part(classes.clone()),
                &targets,
                &weights,
                classes.clone(),
                total,
                merged,
            )
        };
        let found = parts.each_ref().map(|classes| run(classes, None).0);
        assert_eq!(found[0][0][1], f64::NEG_INFINITY);
        assert_eq!((found[1][0][0], found[1][1][0]), (f64::NEG_INFINITY, 0.0));
        let of_row = |row: usize| {
            let peak = found.iter().map(|part| part[0][row]).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = found
                .iter()
                .map(|part| part[1][row] * (part[0][row] - peak).exp())
                .sum();
            let of_target: f64 = found.iter().map(|part| part[2][row]).sum();
            [peak, sum, of_target]
        };
        let merged = [0, 1, 2].map(|part| (0..rows).map(|row| of_row(row)[part]).collect::<Vec<_>>());
        let (expected, whole) = cross_entropy(part(0..total), &targets, weights.to_vec());
        assert_close("losses", &losses(&merged, &weights), &expected, rounding(dtype));
        for classes in &parts {
            let dlogits = run(classes, Some(merged.clone())).1;
            let expected: Vec<f64> = (0..rows)
                .flat_map(|row| whole[row * total..][classes.clone()].to_vec())
                .collect();
            assert_eq!(dlogits.len(), expected.len());
            if !classes.is_empty() {
                assert_close("dlogits", &dlogits, &expected, rounding(dtype));
            }
        }
    }
}

#[test]
fn cross_entropy_matches_pytorch() {
    let fixture = Fixture::load("cross_entropy");
    for case in ["uneven", "uneven_large", "shift"] {
        let get = |name: &str| fixture.get(&format!("{case}.{name}"));
        let (logits, labels) = (get("logits").unwrap(), get("labels").unwrap());
        let valid = labels.iter().filter(|&&label| label >= 0.0).count();
        assert_eq!(
            valid as u64,
            fixture.description["cases"][case]["valid_tokens"].as_u64().unwrap()
        );
        let weights: Vec<f64> = labels
            .iter()
            .map(|&label| if label < 0.0 { 0.0 } else { 1.0 / valid as f64 })
            .collect();
        for (dtype, tolerance) in [(DType::F32, None), (DType::F64, Some(1e-12))] {
            let logits = tensor(logits.clone(), [labels.len(), 50], dtype, &Device::flex());
            let (losses, dlogits) = cross_entropy(logits, &labels, weights.clone());
            let tolerance = |name| tolerance.unwrap_or_else(|| fixture.tolerance(case, name));
            assert_close(case, &dlogits, &get("dlogits_f64").unwrap(), tolerance("dlogits"));
            assert_close(
                case,
                &[losses.iter().sum()],
                &get("mean_f64").unwrap(),
                tolerance("mean"),
            );
            let each: Vec<f64> = losses.iter().map(|loss| loss * valid as f64).collect();
            assert_close(case, &each, &get("token_loss_f64").unwrap(), 5e-6);
            if let Some(wrong) = get("WRONG_dlogits_mean_of_means") {
                assert!(
                    error_to_peak(&dlogits, &wrong) > 0.1,
                    "{case}: the mean of the chunks' means"
                );
            }
        }
    }
}

#[test]
fn cross_entropy_of_narrow_logits() {
    for dtype in DTYPES {
        let device = Device::flex();
        let logits = tensor(
            noise(9 * 133, 1).iter().map(|x| x * 4.0).collect(),
            [9, 133],
            dtype,
            &device,
        );
        let targets: Vec<f64> = (0..9).map(|row| f64::from(row * 14)).collect();
        let exact = tensor(values(logits.clone()), [9, 133], DType::F64, &device);
        let (losses, dlogits) = cross_entropy(logits, &targets, vec![0.25; 9]);
        let (exact_losses, exact_dlogits) = cross_entropy(exact, &targets, vec![0.25; 9]);
        assert_close("losses", &losses, &exact_losses, 1e-6);
        assert_close("dlogits", &dlogits, &exact_dlogits, rounding(dtype));
    }
}

#[test]
fn ignored_rows_are_exactly_zero_whatever_they_hold() {
    let rows = vec![f64::NAN, f64::INFINITY, 1.0, f64::NEG_INFINITY, 2.0, 3.0, 0.0, 0.0, 0.0];
    for dtype in DTYPES {
        let logits = tensor(rows.clone(), [3, 3], dtype, &Device::flex());
        let (losses, dlogits) = cross_entropy(logits, &[-100.0, 99.0, 1.0], vec![0.0, 0.0, 2.0]);
        assert_eq!(losses[..2], [0.0; 2]);
        assert_eq!(dlogits[..6], [0.0; 6]);
        // Equal logits: loss ln 3, gradient 1/3 - onehot, times the weight.
        assert_close("loss", &losses[2..], &[2.0 * 3f64.ln()], 1e-6);
        assert_close(
            "gradient",
            &dlogits[6..],
            &[2.0 / 3.0, -4.0 / 3.0, 2.0 / 3.0],
            rounding(dtype),
        );
    }
}

#[test]
fn logits_of_negative_infinity_are_classes_ruled_out() {
    let logits = tensor(
        vec![f64::NEG_INFINITY, 0.0, 0.0, f64::NEG_INFINITY],
        [1, 4],
        DType::F32,
        &Device::flex(),
    );
    let (losses, dlogits) = cross_entropy(logits, &[1.0], vec![1.0]);
    assert_close("loss", &losses, &[2f64.ln()], 1e-7);
    assert_eq!(dlogits, [0.0, -0.5, 0.5, 0.0]);
}

// ---------------------------------------------------------------------------------------------------------------
// Dropout
// ---------------------------------------------------------------------------------------------------------------

fn whole(shape: &[usize], probability: f64) -> DropoutSpec {
    DropoutSpec {
        probability,
        seed: 42,
        stream: 7,
        shape: shape.to_vec(),
        positions: shape.iter().map(|&size| Positions::whole(size)).collect(),
    }
}

/// The mask of a spec, as the dropout of ones.
fn mask(spec: &DropoutSpec) -> Vec<f64> {
    let len: usize = spec.positions.iter().map(Positions::len).product();
    let shape: [usize; 3] = std::array::from_fn(|dim| spec.positions[dim].len());
    let ones = tensor(vec![1.0; len], shape, DType::F32, &Device::flex());
    values(dropout(ones, spec.clone()))
}

#[test]
fn dropout_follows_the_generator() {
    let spec = whole(&[3, 5, 77], 0.3);
    let philox = Philox::new(spec.seed, spec.stream);
    for dtype in DTYPES {
        for device in autodiff_devices() {
            let x = tensor(noise(3 * 5 * 77, 1), [3, 5, 77], dtype, &device).require_grad();
            let grad = tensor(noise(3 * 5 * 77, 2), [3, 5, 77], dtype, &device);
            let y = dropout(x.clone(), spec.clone());
            let grads = (y.clone() * grad.clone()).sum().backward();
            let dx = x.grad(&grads).unwrap();
            assert_eq!([y.dtype(), dx.dtype()], [dtype; 2]);
            let naive = |x: Vec<f64>| -> Vec<f64> {
                let keep = |i: usize| f64::from(philox.word(i as u64)) >= 0.3 * 2f64.powi(32);
                x.iter()
                    .enumerate()
                    .map(|(i, x)| if keep(i) { x / 0.7 } else { 0.0 })
                    .collect()
            };
            assert_close("y", &values(y), &naive(values(x)), rounding(dtype));
            assert_close("dx", &values(dx), &naive(values(grad)), rounding(dtype));
        }
    }
}

#[test]
fn dropout_masks_of_slices_are_slices_of_the_mask() {
    let shape = [3, 24, 10];
    let whole = whole(&shape, 0.4);
    let reference = mask(&whole);
    let contiguous = |rank: usize| Positions::new([rank * 6..rank * 6 + 6]);
    let zigzag = |rank: usize| Positions::new([rank * 3..rank * 3 + 3, (7 - rank) * 3..(8 - rank) * 3]);
    let mut cases = Vec::new();
    for rank in 0..4 {
        cases.push([Positions::whole(3), contiguous(rank), Positions::whole(10)]);
        cases.push([Positions::whole(3), zigzag(rank), Positions::whole(10)]);
        // A slice of the last dimension, of all dimensions, and a whole in two pieces.
        cases.push([
            Positions::whole(3),
            Positions::whole(24),
            Positions::new([rank * 2..rank * 2 + 3]),
        ]);
        cases.push([
            Positions::new([1..3]),
            zigzag(rank),
            Positions::new([rank..rank + 1, 8..10]),
        ]);
        cases.push([
            Positions::new([rank % 3..rank % 3 + 1]),
            Positions::new([0..7, 7..24]),
            Positions::whole(10),
        ]);
    }
    for positions in cases {
        let mut expected = Vec::new();
        for a in positions[0].iter() {
            for b in positions[1].iter() {
                expected.extend(positions[2].iter().map(|c| reference[(a * 24 + b) * 10 + c]));
            }
        }
        let spec = DropoutSpec {
            positions: positions.to_vec(),
            ..whole.clone()
        };
        assert_eq!(mask(&spec), expected, "{positions:?}");
    }
}

#[test]
fn dropout_keeps_the_right_share_and_depends_on_seed_and_stream() {
    let shape = [10, 100, 128];
    let len = 128_000.0f64;
    for probability in [0.1, 0.5, 0.9] {
        let kept = mask(&whole(&shape, probability)).iter().filter(|&&x| x > 0.0).count() as f64;
        let sigma = (len * probability * (1.0 - probability)).sqrt();
        assert!(
            (kept - len * (1.0 - probability)).abs() < 3.0 * sigma,
            "{probability}: kept {kept} of {len}"
        );
    }
    let spec = whole(&shape, 0.5);
    let differing = |other: DropoutSpec| {
        let (a, b) = (mask(&spec), mask(&other));
        a.iter().zip(&b).filter(|(a, b)| a != b).count() as f64 / len
    };
    assert_eq!(differing(spec.clone()), 0.0);
    let seed = DropoutSpec {
        seed: 43,
        ..spec.clone()
    };
    let stream = DropoutSpec {
        stream: 8,
        ..spec.clone()
    };
    let high = DropoutSpec {
        stream: 7 + (1 << 32),
        ..spec.clone()
    };
    for other in [seed, stream, high] {
        assert!((differing(other) - 0.5).abs() < 0.01);
    }
    assert_eq!(mask(&whole(&shape, 0.0)), vec![1.0; 128_000]);
}

// ---------------------------------------------------------------------------------------------------------------
// All kernels: layouts, dtypes, threads, empty tensors
// ---------------------------------------------------------------------------------------------------------------

/// Every result of every kernel on `[batch, tokens, heads, features]` inputs.
fn all_kernels(x: Float, z: Float, grad: Float) -> Vec<(&'static str, Vec<f64>)> {
    let [x4, z4, grad4] = [x, z, grad].map(wrap::<4>);
    let [batch, tokens, heads, len] = x4.dims();
    let dtype = x4.dtype();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let device = Device::flex();
    // Clones share their buffer, `raw` of a fresh copy does not: both ways of writing the output get their turn.
    let [x, z, grad] = [x4.clone(), z4, grad4].map(|tensor| move || raw(tensor.clone()));
    let vector = |seed| raw(tensor(noise(len, seed), [len], dtype, &device));
    let flat = |tensor: Float| values(wrap::<4>(tensor));
    let line = |tensor: Float| values(wrap::<1>(tensor));
    let mut found = Vec::new();

    let (y, mean, inverse_std) = Flex::layer_norm_forward(x(), vector(11), vector(12), 1e-5);
    let (dx, dweight, dbias) = Flex::layer_norm_backward(x(), vector(11), mean.clone(), inverse_std.clone(), grad());
    found.push(("layer_norm y", flat(y)));
    found.push(("layer_norm mean", line(mean)));
    found.push(("layer_norm inverse_std", line(inverse_std)));
    found.push(("layer_norm dx", flat(dx)));
    found.push(("layer_norm dweight", line(dweight)));
    found.push(("layer_norm dbias", line(dbias)));

    let (y, inverse_rms) = Flex::rms_norm_forward(x(), vector(11), 1e-5);
    let (dx, dweight) = Flex::rms_norm_backward(x(), vector(11), inverse_rms.clone(), grad());
    found.push(("rms_norm y", flat(y)));
    found.push(("rms_norm inverse_rms", line(inverse_rms)));
    found.push(("rms_norm dx", flat(dx)));
    found.push(("rms_norm dweight", line(dweight)));

    let (dgate, dup) = Flex::swiglu_backward(x(), z(), grad());
    found.push(("swiglu y", flat(Flex::swiglu_forward(x(), z()))));
    found.push(("swiglu dgate", flat(dgate)));
    found.push(("swiglu dup", flat(dup)));

    let table = |seed| {
        raw(tensor(
            noise(tokens * (len / 2), seed),
            [tokens, len / 2],
            wide,
            &device,
        ))
    };
    for style in [RotaryStyle::Halves, RotaryStyle::Interleaved] {
        found.push(("rotary", flat(Flex::rotary(x(), table(13), table(14), style, true))));
    }
    found.push((
        "dropout",
        flat(Flex::dropout(x(), &whole(&[batch, tokens, heads, len], 0.3))),
    ));

    let rows = batch * tokens * heads;
    let targets = (0..rows).map(|row| (row % len.max(1)) as f64).collect::<Vec<_>>();
    // Burn reads a 0 in a reshape as "this dimension as it was".
    let logits: Tensor<2> = if rows * len == 0 {
        Tensor::zeros([rows, len], (&device, dtype))
    } else {
        x4.reshape([rows, len])
    };
    let weights = if len == 0 { vec![0.0; rows] } else { noise(rows, 15) };
    let (losses, dlogits) = cross_entropy(logits, &targets, weights);
    found.push(("cross_entropy losses", losses));
    found.push(("cross_entropy dlogits", dlogits));
    found
}

fn sample<const D: usize>(shape: [usize; D], dtype: DType, seed: u64) -> Tensor<D> {
    tensor(noise(shape.iter().product(), seed), shape, dtype, &Device::flex())
}

#[test]
fn views_give_the_bits_of_contiguous_tensors() {
    type View = fn(Tensor<4>) -> Tensor<4>;
    let views: [(&str, [usize; 4], View); 7] = [
        ("last dimension strided", [2, 3, 22, 5], |x| x.swap_dims(2, 3)),
        ("tokens and heads swapped", [2, 3, 5, 22], |x| x.swap_dims(1, 2)),
        ("slice of the features", [2, 5, 3, 66], |x| {
            x.slice([0..2, 0..5, 0..3, 13..35])
        }),
        ("slice of the tokens", [2, 9, 3, 22], |x| {
            x.slice([0..2, 2..7, 0..3, 0..22])
        }),
        ("expanded", [1, 5, 1, 22], |x| x.expand([2, 5, 3, 22])),
        ("flipped", [2, 5, 3, 22], |x| x.flip([1, 3])),
        ("short rows", [2, 5, 3, 6], |x| x.slice([0..2, 0..5, 0..3, 1..5])),
    ];
    for dtype in DTYPES {
        for (name, shape, view) in views {
            let views = [1, 2, 3].map(|seed| raw(view(sample(shape, dtype, seed))));
            let copies = views.clone().map(|view| {
                let dims = wrap::<4>(view.clone()).dims();
                raw(tensor(values(wrap::<4>(view)), dims, dtype, &Device::flex()))
            });
            let ([x, z, grad], [x_copy, z_copy, grad_copy]) = (views, copies);
            let expected = all_kernels(x_copy, z_copy, grad_copy);
            for ((kernel, found), (_, expected)) in all_kernels(x, z, grad).into_iter().zip(expected) {
                assert_eq!(found, expected, "{kernel}, {name}, {dtype:?}");
            }
        }
    }
}

#[test]
fn cross_entropy_takes_any_strides() {
    let views = [
        sample([40, 6], DType::F32, 1).swap_dims(0, 1),
        sample([6, 90], DType::F32, 1).slice([0..6, 7..47]),
        sample([1, 40], DType::F32, 1).expand([6, 40]),
    ];
    for view in views {
        let copy = tensor(values(view.clone()), [6, 40], DType::F32, &Device::flex());
        let run = |logits| {
            cross_entropy(
                logits,
                &[0.0, 39.0, 5.0, 7.0, 20.0, -100.0],
                vec![1.0, 0.5, 2.0, 1.0, 1.0, 0.0],
            )
        };
        assert_eq!(run(view), run(copy));
    }
}

#[test]
fn overwriting_gives_the_bits_of_a_fresh_output() {
    let make = |seed| raw(sample([40, 1000], DType::F32, seed));
    let vector = |seed| raw(sample([1000], DType::F32, seed));
    let run = |x: Float, grad: Float| {
        let (y, mean, inverse_std) = Flex::layer_norm_forward(x, vector(3), vector(4), 1e-5);
        let (dx, dweight, dbias) = Flex::layer_norm_backward(make(1), vector(3), mean, inverse_std, grad);
        (
            values(wrap::<2>(y)),
            values(wrap::<2>(dx)),
            values(wrap::<1>(dweight)),
            values(wrap::<1>(dbias)),
        )
    };
    let (x, grad) = (make(1), make(2));
    let shared = run(x.clone(), grad.clone());
    assert_eq!(shared, run(x, grad));
}

#[test]
fn narrow_dtypes_round_the_exact_result() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let inputs = [1, 2, 3].map(|seed| sample([2, 7, 3, 132], dtype, seed));
        let exact = inputs
            .clone()
            .map(|input| raw(tensor(values(input), [2, 7, 3, 132], DType::F64, &Device::flex())));
        let [x, z, grad] = inputs.map(raw);
        let [x_exact, z_exact, grad_exact] = exact;
        let exact = all_kernels(x_exact, z_exact, grad_exact);
        for ((kernel, found), (_, exact)) in all_kernels(x, z, grad).into_iter().zip(exact) {
            // Weights, statistics and the random vectors are themselves rounded to the dtype here.
            assert_close(&format!("{kernel}, {dtype:?}"), &found, &exact, 4.0 * rounding(dtype));
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let run = || {
        let [x, z, grad] = [1, 2, 3].map(|seed| raw(sample([2, 150, 3, 130], DType::F32, seed)));
        all_kernels(x, z, grad)
    };
    let expected = run();
    for threads in [1, 3, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(run), expected, "{threads} threads");
    }
    // Plain threads, as simulated ranks are, at once.
    let ranks: Vec<_> = (0..4).map(|_| std::thread::spawn(run)).collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap(), expected);
    }
}

#[test]
fn empty_tensors_are_allowed() {
    for dtype in DTYPES {
        for shape in [[0, 5, 3, 8], [2, 0, 3, 8], [2, 5, 0, 8], [2, 5, 3, 0]] {
            let [x, z, grad] = [1, 2, 3].map(|seed| raw(sample(shape, dtype, seed)));
            for (kernel, found) in all_kernels(x, z, grad) {
                let zeros = ["dweight", "dbias", "losses"].iter().any(|name| kernel.ends_with(name));
                assert!(
                    found.is_empty() || kernel.ends_with("mean") || kernel.contains("inverse") || zeros,
                    "{kernel} {shape:?}"
                );
                assert!(!zeros || found.iter().all(|&x| x == 0.0), "{kernel} {shape:?}");
            }
        }
    }
}

#[test]
fn empty_tensors_have_gradients() {
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::zeros([0, 8], &device).require_grad();
    let weight = Tensor::<1>::ones([8], &device).require_grad();
    let y = layer_norm(x.clone(), weight.clone(), weight.clone(), 1e-5);
    let grads = swiglu(rms_norm(y, weight.clone(), 1e-5), x.clone()).sum().backward();
    assert_eq!(x.grad(&grads).unwrap().dims(), [0, 8]);
    assert_eq!(values(weight.grad(&grads).unwrap()), [0.0; 8]);
}

// ---------------------------------------------------------------------------------------------------------------
// Refusals
// ---------------------------------------------------------------------------------------------------------------

#[test]
#[should_panic(expected = "layer_norm: weight has shape [3], expected [4] (x is F32 [2, 4])")]
fn layer_norm_refuses_a_weight_of_another_width() {
    let device = Device::flex();
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
    let device = Device::flex();
    rms_norm(
        Tensor::<2>::ones([2, 4], (&device, DType::BF16)),
        Tensor::ones([4], (&device, DType::F32)),
        1e-5,
    );
}

#[test]
#[should_panic(expected = "swiglu: up has shape [4, 2], expected [2, 4] (gate is F32 [2, 4])")]
fn swiglu_refuses_other_shapes() {
    let device = Device::flex();
    swiglu(Tensor::<2>::ones([2, 4], &device), Tensor::ones([4, 2], &device));
}

#[test]
#[should_panic(expected = "rotary: head_dim is 5, expected an even number")]
fn rotary_refuses_an_odd_head() {
    let device = Device::flex();
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
    let device = Device::flex();
    let table = Tensor::<2>::ones([3, 2], &device);
    rotary(
        Tensor::ones([1, 2, 1, 4], &device),
        table.clone(),
        table,
        RotaryStyle::Halves,
    );
}

#[test]
#[should_panic(expected = "cross_entropy: target 3 of row 1 is not among the 3 classes; give an ignored row weight 0")]
fn cross_entropy_refuses_a_target_out_of_range() {
    cross_entropy(sample([2, 3], DType::F32, 1), &[2.0, 3.0], vec![1.0, 1.0]);
}

#[test]
#[should_panic(expected = "dropout: the probability is 1, expected one in [0, 1)")]
fn dropout_refuses_to_drop_all() {
    mask(&whole(&[1, 2, 3], 1.0));
}

#[test]
#[should_panic(expected = "dropout: x has shape [1, 2, 4], but the spec has positions for [1, 2, 3]")]
fn dropout_refuses_positions_of_another_shape() {
    dropout(Tensor::<3>::ones([1, 2, 4], &Device::flex()), whole(&[1, 2, 3], 0.5));
}

#[test]
#[should_panic(expected = "dropout: the spec has positions up to 9 in dimension 1, past its global shape [1, 2, 3]")]
fn dropout_refuses_positions_past_the_global_shape() {
    let mut spec = whole(&[1, 2, 3], 0.5);
    spec.positions[1] = Positions::new([8..9]);
    mask(&spec);
}
