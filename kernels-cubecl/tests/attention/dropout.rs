//! Dropout of attention weights: which ones are dropped, in any split, and what follows for the gradients.

use burn::tensor::{DType, Tensor, TensorData};
use kernels_cubecl::{AttentionDropout, AttentionSpec, HeadMap, Mask, Positions, attention, philox::Philox};

use crate::backend::device;
use crate::support::{Reference, able, backward, bytes, error, f64s, forward, noise, spec};

fn dropout(probability: f64, shape: [usize; 4]) -> AttentionDropout {
    AttentionDropout {
        probability,
        seed: 7,
        stream: 5 << 32 | 3,
        shape,
        batch: Positions::whole(shape[0]),
        heads: Positions::whole(shape[1]),
    }
}

/// Which weights stay, `[batch, heads, queries, keys]` of the local part, read from the output and once more from the
/// gradient of the values: all scores are equal, and one-hot values or gradients show each weight by itself.
fn read(dropout: &AttentionDropout, queries: &Positions, keys: &Positions) -> Vec<bool> {
    let [batch, heads] = [dropout.batch.len(), dropout.heads.len()];
    let zeros = |tokens: usize, width: usize| Tensor::<4>::zeros([batch, tokens, heads, width], &device());
    let one_hot = |tokens: usize| {
        let ones = (0..tokens * tokens).map(|i| if i % (tokens + 1) == 0 { 1.0f32 } else { 0.0 });
        let data = TensorData::new(ones.collect(), [1, tokens, 1, tokens]);
        Tensor::<4>::from_data(data, &device()).expand([batch, tokens, heads, tokens])
    };
    let map = HeadMap::new(heads, heads);
    let spec = AttentionSpec {
        dropout: Some(dropout.clone()),
        ..spec(Mask::Full, queries.clone(), keys.clone(), 1.0, map)
    };
    let (q, k) = (zeros(queries.len(), 8), zeros(keys.len(), 8));

    let result = forward(&q, &k, &one_hot(keys.len()), &spec);
    // From [batch, queries, heads, keys].
    let weights = f64s(&result.out.clone().swap_dims(1, 2));
    let kept = 1.0 / (keys.len() as f64 * (1.0 - dropout.probability));
    assert!(weights.iter().all(|&x| x == 0.0 || (x - kept).abs() <= 1e-5 * kept));
    // The log-sum-exp is that of all scores.
    let all = keys.len() as f64;
    assert!(f64s(&result.lse()).iter().all(|lse| (lse - all.ln()).abs() <= 1e-5));

    let v = zeros(keys.len(), queries.len());
    let result = forward(&q, &k, &v, &spec);
    let [_, _, dv] = backward(&q, &k, &v, &result, &one_hot(queries.len()), &spec);
    // From [batch, keys, heads, queries].
    let again = f64s(&dv.permute([0, 2, 3, 1]));
    let stays = |weights: &[f64]| -> Vec<bool> { weights.iter().map(|&weight| weight != 0.0).collect() };
    assert!(stays(&again) == stays(&weights));
    stays(&weights)
}

/// The definition: word `((b * heads + h) * queries + q) * keys + k` of the stream, as a fraction.
fn defined(dropout: &AttentionDropout, queries: &Positions, keys: &Positions) -> Vec<bool> {
    let philox = Philox::new(dropout.seed, dropout.stream);
    let [_, heads, all_queries, all_keys] = dropout.shape;
    let mut stays = Vec::new();
    for b in dropout.batch.iter() {
        for h in dropout.heads.iter() {
            for q in queries.iter() {
                stays.extend(keys.iter().map(|k| {
                    let word = philox.word((((b * heads + h) * all_queries + q) * all_keys + k) as u64);
                    f64::from(word) / 2f64.powi(32) >= dropout.probability
                }));
            }
        }
    }
    stays
}

#[test]
fn the_mask_is_the_same_in_any_split() {
    // Several tiles in both directions, and rows that start anywhere within a block of the generator.
    let whole = dropout(0.3, [2, 4, 150, 395]);
    let splits: [(&str, AttentionDropout, Positions, Positions); 6] = [
        ("whole", whole.clone(), Positions::whole(150), Positions::whole(395)),
        (
            "queries in zigzag",
            whole.clone(),
            Positions::new([38..75, 112..150]),
            Positions::whole(395),
        ),
        (
            "keys in zigzag",
            whole.clone(),
            Positions::whole(150),
            Positions::new([0..99, 297..395]),
        ),
        (
            "both, one by one",
            whole.clone(),
            Positions::new((0..150).step_by(3).map(|i| i..i + 1)),
            Positions::new((1..395).step_by(7).map(|i| i..i + 1)),
        ),
        (
            "heads",
            AttentionDropout {
                heads: Positions::new([1..2, 3..4]),
                ..whole.clone()
            },
            Positions::whole(150),
            Positions::whole(395),
        ),
        (
            "batch and heads",
            AttentionDropout {
                batch: Positions::new([1..2]),
                heads: Positions::new([2..4]),
                ..whole.clone()
            },
            Positions::new([7..8, 60..130]),
            Positions::new([3..390]),
        ),
    ];
    for (name, dropout, queries, keys) in splits {
        let same = read(&dropout, &queries, &keys) == defined(&dropout, &queries, &keys);
        assert!(same, "{name}");
    }
}

#[test]
fn masks_differ_by_seed_stream_head_and_sample_and_keep_their_share() {
    let all = Positions::whole(256);
    let base = dropout(0.1, [2, 2, 256, 256]);
    let mut masks: Vec<Vec<bool>> = Vec::new();
    for (seed, stream) in [(7, 3), (8, 3), (7, 4)] {
        let dropout = AttentionDropout {
            seed,
            stream,
            ..base.clone()
        };
        masks.extend(read(&dropout, &all, &all).chunks(256 * 256).map(<[bool]>::to_vec));
    }
    for (i, mask) in masks.iter().enumerate() {
        assert!(masks[..i].iter().all(|earlier| earlier != mask));
        let (n, keep) = (mask.len() as f64, 0.9);
        let kept = mask.iter().filter(|&&stays| stays).count() as f64;
        let sigma = (n * keep * (1.0 - keep)).sqrt();
        assert!((kept - n * keep).abs() <= 3.0 * sigma, "{kept} of {n} kept");
    }
}

fn inputs(batch: usize, len: usize, dtype: DType) -> [Tensor<4>; 4] {
    let noise = |seed, heads| noise(seed, [batch, len, heads, 16], dtype);
    [noise(1, 4), noise(2, 2), noise(3, 2), noise(4, 4)]
}

fn dropping(mask: Mask, positions: Positions, probability: f64, shape: [usize; 4]) -> AttentionSpec {
    let map = HeadMap::new(shape[1], shape[1] / 2);
    AttentionSpec {
        dropout: Some(dropout(probability, shape)),
        ..spec(mask, positions.clone(), positions, 0.25, map)
    }
}

#[test]
fn gradients_are_those_of_the_definition() {
    let zigzag = Positions::new([0..150, 450..600]);
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 3e-6), (DType::BF16, 5e-3)]
        .into_iter()
        .filter(|case| able(case.0))
    {
        for mask in [Mask::Causal, Mask::Full, Mask::documents([100, 70, 350])] {
            let [q, k, v, grad] = inputs(2, 300, dtype);
            let spec = dropping(mask, zigzag.clone(), 0.3, [2, 4, 600, 600]);
            let reference = Reference::new(&q, &k, &v, &grad, &spec);
            let result = forward(&q, &k, &v, &spec);
            assert!(error(&f64s(&result.lse()), &reference.lse) <= tolerance);
            assert!(error(&f64s(&result.out), &reference.out) <= tolerance);
            let grads = backward(&q, &k, &v, &result, &grad, &spec);
            for (name, (actual, expected)) in ["dq", "dk", "dv"].iter().zip(grads.iter().zip(&reference.grads)) {
                let found = error(&f64s(actual), expected);
                assert!(found <= 2.0 * tolerance, "{dtype:?} {:?} {name}: {found:e}", spec.mask);
            }
        }
    }
}

/// As in a ring: the gradients of each part of the keys, from the output and statistics of the whole.
#[test]
fn gradients_of_parts_add_up() {
    let (len, cut) = (300, 130);
    let [q, k, v, grad] = inputs(1, len, DType::F32);
    let spec = dropping(Mask::Causal, Positions::whole(len), 0.3, [1, 4, len, len]);
    let whole = forward(&q, &k, &v, &spec);
    let grads = backward(&q, &k, &v, &whole, &grad, &spec).map(|grad| f64s(&grad));
    let [first, second] = [0..cut, cut..len].map(|tokens| {
        let [k, v] = [&k, &v].map(|x| x.clone().slice([0..1, tokens.clone()]));
        let k_positions = Positions::new([tokens]);
        let spec = AttentionSpec {
            k_positions,
            ..spec.clone()
        };
        backward(&q, &k, &v, &whole, &grad, &spec).map(|grad| f64s(&grad))
    });
    let dq: Vec<f64> = first[0].iter().zip(&second[0]).map(|(a, b)| a + b).collect();
    assert!(error(&dq, &grads[0]) <= 1e-6);
    for i in [1, 2] {
        assert!(error(&[&first[i][..], &second[i]].concat(), &grads[i]) <= 1e-6);
    }
}

#[test]
fn probability_zero_is_none_bit_for_bit() {
    let [q, k, v, grad] = inputs(1, 300, DType::F32);
    let run = |spec: &AttentionSpec| {
        let result = forward(&q, &k, &v, spec);
        let grads = backward(&q, &k, &v, &result, &grad, spec);
        (bytes(&result.out), bytes(&result.stats), grads.map(|grad| bytes(&grad)))
    };
    let with = |dropout| AttentionSpec {
        dropout,
        ..dropping(Mask::Causal, Positions::whole(300), 0.0, [1, 4, 300, 300])
    };
    let none = run(&with(None));
    assert!(none == run(&with(Some(dropout(0.0, [1, 4, 300, 300])))));
    // Nor does dropping change the statistics.
    let some = run(&with(Some(dropout(0.5, [1, 4, 300, 300]))));
    assert!(none.0 != some.0 && none.1 == some.1);
}

#[test]
fn autodiff_draws_the_same_mask_again() {
    let spec = dropping(Mask::Causal, Positions::whole(70), 0.3, [1, 4, 70, 70]);
    let [q, k, v, grad] = inputs(1, 70, DType::F32);
    let result = forward(&q, &k, &v, &spec);
    let expected = backward(&q, &k, &v, &result, &grad, &spec);
    for device in [device().autodiff(), device().autodiff().gradient_checkpointing()] {
        let on = |tensor: &Tensor<4>| Tensor::<4>::from_data(tensor.to_data(), &device);
        let tracked = [&q, &k, &v].map(|tensor| on(tensor).require_grad());
        let [q, k, v] = tracked.clone();
        let (out, _) = attention(q, k, v, spec.clone());
        assert!(bytes(&out) == bytes(&result.out));
        let grads = (out * on(&grad)).sum().backward();
        for (input, expected) in tracked.iter().zip(&expected) {
            assert!(bytes(&input.grad(&grads).expect("a gradient")) == bytes(expected));
        }
    }
}
