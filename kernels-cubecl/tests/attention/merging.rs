//! Attention to parts of the keys, merged, is attention to all of them. Case 27.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Tensor};
use kernels_cubecl::{AttentionSpec, HeadMap, Kernels, Mask, Positions};

use crate::backend::{Raw, device};
use crate::support::{Forward, able, bytes, error, f64s, forward, noise, primitive, spec};

pub fn merge(one: &Forward, other: &Forward) -> Forward {
    let (out, stats) = Raw::attention_merge(
        primitive(&one.out),
        primitive(&one.stats),
        primitive(&other.out),
        primitive(&other.stats),
    );
    Forward {
        out: Tensor::from_primitive::<Raw>(out),
        stats: Tensor::from_primitive::<Raw>(stats),
    }
}

/// Output 0, largest score negative infinity, logarithm 0 in every row.
fn nothing(like: &Forward) -> Forward {
    let dtype = like.stats.dtype();
    let device = device();
    let [_, batch, heads, tokens] = like.stats.dims();
    let numbers = |value: f64| Tensor::<4>::full([1, batch, heads, tokens], value, (&device, dtype));
    Forward {
        out: Tensor::zeros(like.out.dims(), (&device, dtype)),
        stats: Tensor::cat(vec![numbers(f64::NEG_INFINITY), numbers(0.0)], 0),
    }
}

fn some(dtype: DType) -> Forward {
    Forward {
        out: noise(1, [2, 300, 3, 5], dtype),
        stats: noise(2, [2, 2, 3, 300], dtype).mul_scalar(50.0),
    }
}

#[test]
fn nothing_is_neutral_bit_for_bit() {
    for dtype in [DType::F32, DType::F64].into_iter().filter(|&dtype| able(dtype)) {
        let some = some(dtype);
        let nothing = nothing(&some);
        for (name, merged, expected) in [
            ("some with nothing", merge(&some, &nothing), &some),
            ("nothing with some", merge(&nothing, &some), &some),
            ("nothing with nothing", merge(&nothing, &nothing), &nothing),
        ] {
            assert_eq!(bytes(&merged.out), bytes(&expected.out), "{name}, {dtype:?}");
            assert_eq!(bytes(&merged.stats), bytes(&expected.stats), "{name}, {dtype:?}");
        }
    }
}

/// Only some rows saw something, others on the other side, others on both.
#[test]
fn each_row_stands_for_itself() {
    let stats = |largest: [f32; 4], log_sum: [f32; 4]| Tensor::<4>::from_data([[[largest]], [[log_sum]]], &device());
    let out = |values: [f32; 4]| {
        let rows = values.map(|x| [[x, -x]]);
        Tensor::<4>::from_data([rows], &device())
    };
    let inf = f32::INFINITY;
    let one = Forward {
        out: out([1.0, 0.0, 3.0, 0.0]),
        stats: stats([0.5, -inf, 2.0, -inf], [0.25, 0.0, 1.0, 0.0]),
    };
    let other = Forward {
        out: out([0.0, 7.0, 5.0, 0.0]),
        stats: stats([-inf, -80.0, 2.0, -inf], [0.0, 2.0, 1.0, 0.0]),
    };
    let merged = merge(&one, &other);
    // Equal weights: the mean, and a log-sum-exp larger by ln 2.
    assert_eq!(f64s(&merged.out), [1.0, -1.0, 7.0, -7.0, 4.0, -4.0, 0.0, 0.0]);
    let ln = 1.0 + 2f32.ln();
    let expected = [[0.5, -80.0, 2.0, -inf], [0.25, 2.0, ln, 0.0]];
    assert_eq!(
        f64s(&merged.stats),
        expected.concat().into_iter().map(f64::from).collect::<Vec<_>>()
    );
}

/// Where scores are a million, an f32 log-sum-exp would have lost its fraction: three equal keys and one are four.
#[test]
fn huge_scores_lose_nothing() {
    let part = |keys: f32, out: f32, largest: f32| Forward {
        out: Tensor::from_data([[[[out]]]], &device()),
        stats: Tensor::from_data([[[[largest]]], [[[keys.ln()]]]], &device()),
    };
    for largest in [1e6, -1e6] {
        let merged = merge(&part(3.0, 2.0, largest), &part(1.0, 6.0, largest));
        assert!((f64s(&merged.out)[0] - 3.0).abs() < 1e-6);
        let expected = [f64::from(largest), f64::from(4f32.ln())];
        assert!((f64s(&merged.stats)[1] - expected[1]).abs() < 1e-6 && f64s(&merged.stats)[0] == expected[0]);
    }
}

#[test]
fn parts_in_any_order_are_the_whole() {
    for (dtype, allowed) in [(DType::F64, 1e-14), (DType::F32, 1e-6)]
        .into_iter()
        .filter(|case| able(case.0))
    {
        let keys = 50;
        let [q, k, v] = [[2, 20, 4, 8], [2, keys, 2, 8], [2, keys, 2, 6]].map(|shape| noise(7, shape, dtype));
        let of = |keys: Positions| AttentionSpec {
            wide: true,
            ..spec(
                Mask::Causal,
                Positions::new([5..15, 30..40]),
                keys,
                0.3,
                HeadMap::new(4, 2),
            )
        };
        let part = |range: std::ops::Range<usize>| {
            let slice = |tensor: &Tensor<4>| tensor.clone().narrow(1, range.start, range.len());
            forward(&q, &slice(&k), &slice(&v), &of(Positions::new([range.clone()])))
        };
        let whole = forward(&q, &k, &v, &of(Positions::whole(keys)));
        let parts = [0..10, 10..13, 13..40, 40..50];
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
            let merged = order
                .map(|index| part(parts[index].clone()))
                .into_iter()
                .reduce(|a, b| merge(&a, &b));
            let merged = merged.expect("there are four parts");
            let errors = [
                error(&f64s(&merged.out), &f64s(&whole.out)),
                error(&f64s(&merged.lse()), &f64s(&whole.lse())),
            ];
            assert!(
                errors.iter().all(|error| *error < allowed),
                "{dtype:?}, {order:?}: {errors:?}"
            );
        }
    }
}

#[test]
fn views_and_shared_tensors_are_left_alone() {
    let (one, other) = (some(DType::F32), some(DType::F32));
    let expected = merge(&one, &other);
    let view = |forward: &Forward| Forward {
        out: forward
            .out
            .clone()
            .swap_dims(1, 2)
            .clone()
            .to_device(&device())
            .swap_dims(1, 2),
        stats: forward.stats.clone().swap_dims(1, 2).mul_scalar(1.0).swap_dims(1, 2),
    };
    let before = bytes(&one.out);
    let merged = merge(&view(&one), &view(&other));
    assert_eq!(bytes(&merged.out), bytes(&expected.out));
    assert_eq!(bytes(&merged.stats), bytes(&expected.stats));
    assert_eq!(bytes(&one.out), before, "the input is still someone else's");
    // No rows at all.
    let empty = Forward {
        out: Tensor::zeros([1, 0, 2, 3], &device()),
        stats: Tensor::zeros([2, 1, 2, 0], &device()),
    };
    assert_eq!(merge(&empty, &empty).out.dims(), [1, 0, 2, 3]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |one: &Forward, other: &Forward| {
        let payload = catch_unwind(AssertUnwindSafe(|| drop(merge(one, other)))).expect_err("a refusal");
        payload.downcast_ref::<String>().expect("a formatted message").clone()
    };
    let fits = some(DType::F32);
    let short = Forward {
        out: fits.out.clone().narrow(1, 0, 299),
        stats: fits.stats.clone(),
    };
    let narrow = Forward {
        out: fits.out.clone().cast(DType::BF16),
        stats: fits.stats.clone(),
    };
    for (other, words) in [(&short, "[2, 299, 3, 5] F32"), (&narrow, "BF16")] {
        let message = refused(&fits, other);
        assert!(
            message.starts_with("attention merge: ") && message.contains(words),
            "{message}"
        );
        assert!(message.contains("expected [batch, tokens, heads, dim]"), "{message}");
    }
}
