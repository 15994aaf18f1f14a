//! Softmax cross entropy, of all classes at once and in parts.

use std::ops::Range;

use burn::backend::{DispatchKindConversion, DispatchTensor, Flex};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kernels_cubecl::Kernels;

use crate::support::*;

/// `(peaks, sums, logits of the targets)` of each row, and the gradient given these or others.
fn cross_entropy_parts<B: Kernels>(
    logits: Tensor<2>,
    targets: &[f64],
    weights: &[f64],
    classes: Range<usize>,
    total: usize,
    merged: Option<[Vec<f64>; 3]>,
) -> ([Vec<f64>; 3], Vec<f64>)
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let (device, input) = (logits.device(), logits.dtype());
    let dtype = wide(input);
    let rows = targets.len();
    let targets: Vec<i64> = targets.iter().map(|&target| target as i64).collect();
    let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [rows]), &device)
        .try_into_primitive::<B>()
        .unwrap();
    let weights = raw_of::<B, 1>(tensor(weights.to_vec(), [rows], dtype, &device));
    let logits = raw_of::<B, 2>(logits);
    let own = B::cross_entropy_statistics(logits.clone(), targets.clone(), weights.clone(), classes.start, total);
    let statistics = match merged {
        Some(merged) => raw_of::<B, 2>(tensor(merged.concat(), [3, rows], dtype, &device)),
        None => own.clone(),
    };
    let dlogits = B::cross_entropy_gradient(logits, targets, weights, statistics, classes.start);
    let (own, dlogits) = (wrap_of::<B, 2>(own), wrap_of::<B, 2>(dlogits));
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
    cross_entropy_on::<Raw>(logits, targets, weights)
}

/// The same on another backend.
pub fn cross_entropy_on<B: Kernels>(logits: Tensor<2>, targets: &[f64], weights: Vec<f64>) -> (Vec<f64>, Vec<f64>)
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let classes = logits.dims()[1];
    let (statistics, dlogits) = cross_entropy_parts::<B>(logits, targets, &weights, 0..classes, classes, None);
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
    for dtype in among([DType::F64, DType::F32]) {
        let part = |classes: Range<usize>| {
            let values = (0..rows).flat_map(|row| logits[row * total..][classes.clone()].to_vec());
            tensor(values.collect(), [rows, classes.len()], dtype, &device())
        };
        let parts = [0..3, 3..3, 3..9, 9..10];
        let run = |classes: &Range<usize>, merged| {
            cross_entropy_parts::<Raw>(
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
        for dtype in among([DType::F32, DType::F64]) {
            let tolerance = (dtype == DType::F64).then_some(1e-12);
            let logits = tensor(logits.clone(), [labels.len(), 50], dtype, &device());
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
    for dtype in dtypes() {
        let device = device();
        let logits = tensor(
            noise(9 * 133, 1).iter().map(|x| x * 4.0).collect(),
            [9, 133],
            dtype,
            &device,
        );
        let targets: Vec<f64> = (0..9).map(|row| f64::from(row * 14)).collect();
        let exact = tensor(values(logits.clone()), [9, 133], DType::F64, &Device::flex());
        let (losses, dlogits) = cross_entropy(logits, &targets, vec![0.25; 9]);
        let (exact_losses, exact_dlogits) = cross_entropy_on::<Flex>(exact, &targets, vec![0.25; 9]);
        assert_close("losses", &losses, &exact_losses, 1e-6);
        assert_close("dlogits", &dlogits, &exact_dlogits, rounding(dtype));
    }
}

#[test]
fn ignored_rows_are_exactly_zero_whatever_they_hold() {
    let rows = vec![f64::NAN, f64::INFINITY, 1.0, f64::NEG_INFINITY, 2.0, 3.0, 0.0, 0.0, 0.0];
    for dtype in dtypes() {
        let logits = tensor(rows.clone(), [3, 3], dtype, &device());
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
        &device(),
    );
    let (losses, dlogits) = cross_entropy(logits, &[1.0], vec![1.0]);
    assert_close("loss", &losses, &[2f64.ln()], 1e-7);
    assert_eq!(dlogits, [0.0, -0.5, 0.5, 0.0]);
}

#[test]
fn cross_entropy_takes_any_strides() {
    let views = [
        sample([40, 6], DType::F32, 1).swap_dims(0, 1),
        sample([6, 90], DType::F32, 1).slice([0..6, 7..47]),
        sample([1, 40], DType::F32, 1).expand([6, 40]),
    ];
    for view in views {
        let copy = tensor(values(view.clone()), [6, 40], DType::F32, &device());
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
#[should_panic(expected = "cross_entropy: target 3 of row 1 is not among the 3 classes; give an ignored row weight 0")]
fn cross_entropy_refuses_a_target_out_of_range() {
    cross_entropy(sample([2, 3], DType::F32, 1), &[2.0, 3.0], vec![1.0, 1.0]);
}
