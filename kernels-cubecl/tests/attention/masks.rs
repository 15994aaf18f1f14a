//! Every mask through the kernel: what is counted, and gradients against the definition in f64.

use burn::tensor::DType;
use kernels_cubecl::{Blocks, HeadMap, Mask, MaskRule, Positions};

use crate::support::{Reference, able, backward, error, f64s, forward, noise, spec};

/// No pattern at all, and only what a rule must have.
#[derive(Debug)]
struct Scattered;

impl MaskRule for Scattered {
    fn visible(&self, query: usize, key: usize) -> bool {
        (query * 31 + key * 17 + query * key).is_multiple_of(3)
    }
}

/// One or more of every kind, of sizes that matter to a sequence of `len` tokens.
pub fn masks(len: usize) -> Vec<Mask> {
    let part = |share: usize| len.div_ceil(share);
    let window = |size, sink| Mask::Window { size, sink };
    let blocks = Blocks::new(part(5)).with_first(part(9));
    // The documents end before the sequence does, so that the last queries see nothing.
    let lengths = [part(4), 1, 0, part(3), part(7)].map(|length| length.min(len / 3));
    vec![
        Mask::Full,
        Mask::Causal,
        window(3, 0),
        window(part(4), 2),
        window(0, part(3)),
        Mask::documents(lengths),
        Mask::whole_documents(lengths),
        Mask::documents([len]),
        Mask::documents(lengths).and(window(part(8), 1)),
        Mask::block_causal(blocks),
        Mask::BlockCausal {
            blocks,
            window: Some(part(3)),
            sink: part(9),
        },
        Mask::TeacherForcing { blocks, half: len / 2 },
        Mask::custom(Scattered),
        Mask::custom(Scattered).and(Mask::whole_documents(lengths)),
    ]
}

#[test]
fn every_mask_against_the_definition() {
    const LEN: usize = 600;
    let outer = Positions::new([0..150, 450..600]);
    let inner = Positions::new([150..450]);
    let map = HeadMap::new(4, 2);
    for mask in masks(LEN) {
        for (queries, keys) in [(&outer, &outer), (&inner, &outer), (&outer, &inner)] {
            for (dtype, tolerance) in [(DType::F32, 3e-6), (DType::F64, 1e-14)]
                .into_iter()
                .filter(|case| able(case.0))
            {
                let [q, grad] = [1, 2].map(|seed| noise(seed, [1, queries.len(), 4, 16], dtype));
                let [k, v] = [3, 4].map(|seed| noise(seed, [1, keys.len(), 2, 16], dtype));
                let spec = spec(mask.clone(), queries.clone(), keys.clone(), 0.25, map);
                let reference = Reference::new(&q, &k, &v, &grad, &spec);
                let result = forward(&q, &k, &v, &spec);
                let grads = backward(&q, &k, &v, &result, &grad, &spec);
                let (out, lse) = (f64s(&result.out), f64s(&result.lse()));
                let grads = grads.map(|grad| f64s(&grad));

                assert!(error(&lse, &reference.lse) <= tolerance, "{mask:?} {dtype:?}: lse");
                assert!(error(&out, &reference.out) <= tolerance, "{mask:?} {dtype:?}: out");
                for (name, (actual, expected)) in ["dq", "dk", "dv"].iter().zip(grads.iter().zip(&reference.grads)) {
                    let found = error(actual, expected);
                    assert!(found <= 2.0 * tolerance, "{mask:?} {dtype:?}: {name} {found:e}");
                }
                // A query that sees nothing: output 0, log-sum-exp negative infinity, gradient 0, exactly.
                for (i, query) in queries.iter().enumerate() {
                    if keys.iter().any(|key| mask.visible(query, key)) {
                        continue;
                    }
                    let row = i * 4 * 16..(i + 1) * 4 * 16;
                    assert!(out[row.clone()].iter().chain(&grads[0][row]).all(|&x| x == 0.0));
                    assert!((0..4).all(|head| lse[head * queries.len() + i] == f64::NEG_INFINITY));
                }
                // So does a key that no query sees.
                for (j, key) in keys.iter().enumerate() {
                    if !queries.iter().any(|query| mask.visible(query, key)) {
                        let row = j * 2 * 16..(j + 1) * 2 * 16;
                        assert!(grads[1][row.clone()].iter().chain(&grads[2][row]).all(|&x| x == 0.0));
                    }
                }
            }
        }
    }
}

/// Hidden keys may hold anything: NaN, infinity or large numbers, padding behind the last document among them (case
/// 20), and between keys that are seen.
#[test]
fn hidden_keys_have_no_influence() {
    const LEN: usize = 300;
    let all = || Positions::whole(LEN);
    let [q, k, v, grad] = [1, 2, 3, 4].map(|seed| noise(seed, [1, LEN, 2, 16], DType::F32));
    for mask in masks(LEN) {
        let spec = spec(mask.clone(), all(), all(), 0.25, HeadMap::new(2, 2));
        let hidden: Vec<usize> = (0..LEN)
            .filter(|&key| !(0..LEN).any(|query| mask.visible(query, key)))
            .collect();
        let (mut wild_k, mut wild_v) = (k.clone(), v.clone());
        for &key in &hidden {
            let ranges = [0..1, key..key + 1];
            let wild = noise(5, [1, 1, 2, 16], DType::F32) * [f32::NAN, f32::INFINITY, 1e20][key / 3 % 3];
            wild_k = wild_k.slice_assign(ranges.clone(), wild.clone());
            wild_v = wild_v.slice_assign(ranges, wild);
        }
        let run = |k, v| {
            let result = forward(&q, k, v, &spec);
            let grads = backward(&q, k, v, &result, &grad, &spec);
            (f64s(&result.out), f64s(&result.lse()), grads.map(|grad| f64s(&grad)))
        };
        assert!(run(&k, &v) == run(&wild_k, &wild_v), "{mask:?}");
    }
}
