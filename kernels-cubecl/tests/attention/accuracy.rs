//! Errors of every dtype against the definition in f64, at awkward sizes.

use burn::tensor::{DType, Tensor};
use kernels_cubecl::{HeadMap, Mask, Positions, attention};

use crate::backend::{ROUNDED_WEIGHTS, device};
use crate::support::{Reference, able, backward, error, f64s, forward, noise, spec};

struct Case {
    queries: Positions,
    keys: Positions,
    mask: Mask,
    heads: usize,
    kv_heads: usize,
    map: HeadMap,
    dims: [usize; 2],
}

fn cases() -> Vec<Case> {
    let case = |queries: Positions, keys: Positions, mask, [heads, kv_heads]: [usize; 2], dims| Case {
        queries,
        keys,
        mask,
        heads,
        kv_heads,
        map: HeadMap::new(heads, kv_heads),
        dims,
    };
    let whole = Positions::whole;
    let zigzag = |from: usize| Positions::new([from..from + 150, 700 - from..850 - from]);
    vec![
        case(whole(1), whole(1), Mask::Causal, [1, 1], [1, 1]),
        case(whole(3), whole(5), Mask::Full, [2, 2], [2, 3]),
        case(whole(67), whole(67), Mask::Causal, [3, 3], [40, 24]),
        case(whole(300), whole(517), Mask::Full, [4, 2], [64, 64]),
        case(whole(530), whole(530), Mask::Causal, [4, 1], [64, 48]),
        case(zigzag(0), zigzag(0), Mask::Causal, [2, 2], [32, 32]),
        case(zigzag(0), zigzag(150), Mask::Causal, [2, 2], [32, 32]),
        case(whole(130), whole(130), Mask::Causal, [2, 1], [256, 256]),
        // A rank whose heads 3..8 of 9 read three groups of 3, ragged at both ends.
        Case {
            map: HeadMap { ratio: 3, offset: 2 },
            ..case(whole(70), whole(70), Mask::Causal, [6, 3], [16, 16])
        },
        // A key/value head that no query head reads.
        Case {
            map: HeadMap { ratio: 2, offset: 0 },
            ..case(whole(40), whole(40), Mask::Full, [2, 2], [16, 16])
        },
    ]
}

#[test]
fn all_dtypes_against_the_definition() {
    // (dtype, error of results rounded once to it, error of the f32 or f64 accumulation)
    for (dtype, rounded, wide) in [
        (DType::F64, 1e-14, 1e-14),
        (DType::F32, 3e-6, 3e-6),
        (DType::F16, 6e-4, 3e-6),
        (DType::BF16, 5e-3, 3e-6),
    ]
    .into_iter()
    .filter(|case| able(case.0))
    {
        for (i, case) in cases().into_iter().enumerate() {
            let batch = 1 + i % 2;
            let [dim, value_dim] = case.dims;
            let q = noise(1, [batch, case.queries.len(), case.heads, dim], dtype);
            let k = noise(2, [batch, case.keys.len(), case.kv_heads, dim], dtype);
            let v = noise(3, [batch, case.keys.len(), case.kv_heads, value_dim], dtype);
            let grad = noise(4, [batch, case.queries.len(), case.heads, value_dim], dtype);
            let scale = 1.0 / (dim as f64).sqrt();
            let mut spec = spec(case.mask, case.queries, case.keys, scale, case.map);
            let reference = Reference::new(&q, &k, &v, &grad, &spec);
            // Weights that are rounded leave their mark on outputs that are not.
            let wide_tolerance = if ROUNDED_WEIGHTS { rounded } else { wide };
            for (is_wide, tolerance) in [(false, rounded), (true, wide_tolerance)] {
                spec.wide = is_wide;
                let result = forward(&q, &k, &v, &spec);
                let grads = backward(&q, &k, &v, &result, &grad, &spec);
                let accumulator = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
                let expected = if is_wide { accumulator } else { dtype };
                assert_eq!(result.lse().dtype(), accumulator);
                let lse_error = error(&f64s(&result.lse()), &reference.lse);
                assert!(lse_error <= wide, "{dtype:?} case {i}: lse {lse_error:e}");
                let out_error = error(&f64s(&result.out), &reference.out);
                assert!(
                    out_error <= tolerance,
                    "{dtype:?} case {i} wide {is_wide}: out {out_error:e}"
                );
                for (name, (actual, reference)) in ["dq", "dk", "dv"].iter().zip(grads.iter().zip(&reference.grads)) {
                    assert_eq!(actual.dtype(), expected);
                    // A rounded output makes delta inexact; one gradient vanishes when there is one key.
                    let floor = reference.iter().all(|x| x.abs() < 1e-9);
                    let found = error(&f64s(actual), reference);
                    assert!(
                        floor || found <= 2.0 * tolerance,
                        "{dtype:?} case {i} wide {is_wide}: {name} {found:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn autodiff_gives_gradients_in_the_dtype_of_the_inputs() {
    let device = device().autodiff();
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .filter(|&dtype| able(dtype))
    {
        for wide in [false, true] {
            let [q, k, v] = [1, 2, 3].map(|seed| {
                let tensor: Tensor<4> = noise(seed, [1, 9, 2, 8], dtype);
                Tensor::<4>::from_data(tensor.to_data(), (&device, dtype)).require_grad()
            });
            let mut spec = spec(
                Mask::Causal,
                Positions::whole(9),
                Positions::whole(9),
                0.3,
                HeadMap::new(2, 2),
            );
            spec.wide = wide;
            let (out, lse) = attention(q.clone(), k.clone(), v.clone(), spec);
            assert!(!lse.is_require_grad());
            let grads = out.sum().backward();
            for input in [q, k, v] {
                assert_eq!(input.grad(&grads).expect("a gradient").dtype(), dtype);
            }
        }
    }
}

#[test]
fn only_tracked_inputs_get_gradients() {
    let device = device().autodiff();
    let input = |seed, tracked| {
        let tensor = noise(seed, [1, 9, 2, 8], DType::F32);
        let tensor = Tensor::<4>::from_data(tensor.to_data(), &device);
        if tracked { tensor.require_grad() } else { tensor }
    };
    let spec = spec(
        Mask::Causal,
        Positions::whole(9),
        Positions::whole(9),
        0.3,
        HeadMap::new(2, 2),
    );
    let run = |tracked: [bool; 3]| {
        let inputs = [1, 2, 3].map(|seed| input(seed, tracked[seed as usize - 1]));
        let [q, k, v] = inputs.clone();
        let (out, _) = attention(q, k, v, spec.clone());
        let grads = out.sum().backward();
        inputs.map(|input| input.grad(&grads).map(|grad| f64s(&grad)))
    };
    let all = run([true; 3]);
    for only in 0..3 {
        let found = run([only == 0, only == 1, only == 2]);
        for i in 0..3 {
            assert_eq!(found[i], all[i].clone().filter(|_| i == only));
        }
    }
    let [q, k, v] = [1, 2, 3].map(|seed| input(seed, false));
    assert!(!attention(q, k, v, spec).0.is_require_grad());
}
