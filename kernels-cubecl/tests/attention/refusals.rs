//! Inputs that cannot work are refused with one line that says what would.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Tensor};
use kernels_cubecl::{AttentionDropout, AttentionSpec, HeadMap, Mask, Positions};

use crate::support::{Forward, backward, forward, noise, spec};

fn message(work: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(work)).expect_err("a refusal");
    payload.downcast_ref::<String>().expect("a formatted message").clone()
}

fn fitting() -> ([Tensor<4>; 3], AttentionSpec) {
    let shapes = [[1, 6, 4, 8], [1, 5, 2, 8], [1, 5, 2, 8]];
    let inputs = shapes.map(|shape| noise(1, shape, DType::F32));
    let spec = spec(
        Mask::Causal,
        Positions::whole(6),
        Positions::whole(5),
        1.0,
        HeadMap::new(4, 2),
    );
    (inputs, spec)
}

fn assert_refused(change: impl FnOnce(&mut [Tensor<4>; 3], &mut AttentionSpec), expected: &[&str]) {
    let (mut inputs, mut spec) = fitting();
    change(&mut inputs, &mut spec);
    let [q, k, v] = &inputs;
    let message = message(|| drop(forward(q, k, v, &spec)));
    for part in expected {
        assert!(message.contains(part), "{part:?} missing from: {message}");
    }
    assert!(
        message.starts_with("attention: q [1, 6, 4") && !message.contains('\n'),
        "{message}"
    );
}

#[test]
fn forward_refuses() {
    assert_refused(
        |inputs, _| inputs[1] = noise(1, [1, 5, 2, 9], DType::F32),
        &["k [1, 5, 2, 9]", "expected k [1, keys, kv_heads, 8]"],
    );
    assert_refused(
        |inputs, _| inputs[2] = noise(1, [1, 4, 2, 8], DType::F32),
        &["v [1, 4, 2, 8]", "expected k [1, keys, kv_heads, 8]"],
    );
    assert_refused(
        |inputs, _| inputs[2] = inputs[2].clone().cast(DType::BF16),
        &["F32", "BF16", "expected one dtype"],
    );
    assert_refused(
        |_, spec| spec.heads = HeadMap { ratio: 1, offset: 0 },
        &["4 query heads beyond the 2 key/value heads"],
    );
    assert_refused(
        |_, spec| spec.heads = HeadMap { ratio: 2, offset: 1 },
        &["4 query heads beyond the 2 key/value heads"],
    );
    assert_refused(
        |_, spec| spec.q_positions = Positions::whole(5),
        &["q has 6 tokens but q_positions 5 positions"],
    );
    assert_refused(
        |_, spec| spec.k_positions = Positions::whole(6),
        &["k has 5 tokens but k_positions 6 positions"],
    );
    let dropout = || AttentionDropout {
        probability: 0.1,
        seed: 1,
        stream: 1,
        shape: [1, 4, 6, 5],
        batch: Positions::whole(1),
        heads: Positions::whole(4),
    };
    for probability in [1.0, -0.1, f64::NAN] {
        assert_refused(
            |_, spec| {
                spec.dropout = Some(AttentionDropout {
                    probability,
                    ..dropout()
                })
            },
            &["dropout: the probability is", "expected one in [0, 1)"],
        );
    }
    assert_refused(
        |_, spec| {
            spec.dropout = Some(AttentionDropout {
                heads: Positions::whole(2),
                ..dropout()
            })
        },
        &["dropout: the positions are those of a [1, 2, 6, 5], expected [1, 4, 6, 5]"],
    );
    assert_refused(
        |_, spec| {
            spec.dropout = Some(AttentionDropout {
                shape: [1, 4, 5, 5],
                ..dropout()
            })
        },
        &["dropout: there are positions up to 6 in dimension 2, past the global shape [1, 4, 5, 5]"],
    );
}

#[test]
fn backward_refuses() {
    let ([q, k, v], spec) = fitting();
    let result = forward(&q, &k, &v, &spec);
    let refusal = |result: Forward, grad: Tensor<4>| {
        let message = message(|| drop(backward(&q, &k, &v, &result, &grad, &spec)));
        assert!(message.starts_with("attention backward: out ["), "{message}");
        assert!(
            message.contains("expected out and grad_out [1, 6, 4, 8] in F32"),
            "{message}"
        );
        assert!(message.contains("stats [2, 1, 4, 6]"), "{message}");
    };
    let copy = || Forward {
        out: result.out.clone(),
        stats: result.stats.clone(),
    };
    refusal(copy(), noise(1, [1, 6, 4, 7], DType::F32));
    refusal(copy(), noise(1, [1, 6, 4, 8], DType::F64));
    refusal(
        Forward {
            stats: result.stats.clone().swap_dims(2, 3),
            ..copy()
        },
        noise(1, [1, 6, 4, 8], DType::F32),
    );
}
