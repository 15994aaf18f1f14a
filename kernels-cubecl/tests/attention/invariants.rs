//! What has to hold exactly, whatever the numbers.

use burn::tensor::{DType, Tensor, TensorData};
use kernels_cubecl::{AttentionSpec, HeadMap, Mask, Positions};

use crate::backend::{ROUNDED_WEIGHTS, device};
use crate::masks::masks;
use crate::support::{able, backward, bytes, error, f64s, forward, noise, spec};

/// With q = 0 and the token's id as its value, exp(lse) counts the visible keys and the output is their mean id.
#[test]
fn counting() {
    let split = |len: usize| {
        let half = len / 2;
        let quarter = len / 4;
        [
            Positions::whole(len),
            Positions::new([half..len]),
            Positions::new([0..quarter, len - quarter..len]),
            Positions::new([quarter..half, half + 1..len - quarter.min(1)]),
            Positions::new((0..len).step_by(3).map(|i| i..i + 1)),
        ]
    };
    for len in [1, 2, 7, 65, 257, 600] {
        for (queries, keys) in split(len).into_iter().flat_map(|q| split(len).map(|k| (q.clone(), k))) {
            for mask in masks(len) {
                let q = Tensor::<4>::zeros([1, queries.len(), 2, 8], &device());
                let k = noise(1, [1, keys.len(), 1, 8], DType::F32);
                let ids: Vec<f32> = keys.iter().map(|id| id as f32).collect();
                let v = Tensor::from_data(TensorData::new(ids, [1, keys.len(), 1, 1]), &device());
                let spec = spec(mask.clone(), queries.clone(), keys.clone(), 1.0, HeadMap::new(2, 1));
                let result = forward(&q, &k, &v, &spec);
                let (out, lse) = (f64s(&result.out), f64s(&result.lse()));
                for (i, query) in queries.iter().enumerate() {
                    let seen: Vec<usize> = keys.iter().filter(|&key| mask.visible(query, key)).collect();
                    let mean = seen.iter().sum::<usize>() as f64 / seen.len().max(1) as f64;
                    for head in 0..2 {
                        assert_eq!(lse[head * queries.len() + i].exp().round() as usize, seen.len());
                        assert!(
                            (out[i * 2 + head] - mean).abs() <= 1e-3,
                            "{} not {mean}",
                            out[i * 2 + head]
                        );
                    }
                }
            }
        }
    }
}

/// Keys in two parts, merged by their log-sum-exp, are the whole; gradients of the parts add up to the whole.
#[test]
fn parts_merge_to_the_whole() {
    let (len, cut) = (300, 130);
    let dtype = if able(DType::BF16) { DType::BF16 } else { DType::F32 };
    let tolerance = if ROUNDED_WEIGHTS { 5e-3 } else { 1e-6 };
    let [q, k, v, grad] = [1, 2, 3, 4].map(|seed| noise(seed, [1, len, 2, 32], dtype));
    let mut whole_spec = spec(
        Mask::Causal,
        Positions::whole(len),
        Positions::whole(len),
        0.2,
        HeadMap::new(2, 2),
    );
    whole_spec.wide = true;
    let whole = forward(&q, &k, &v, &whole_spec);
    let whole_grads = backward(&q, &k, &v, &whole, &grad, &whole_spec);

    let part = |tokens: std::ops::Range<usize>| {
        let [k, v] = [&k, &v].map(|x| x.clone().slice([0..1, tokens.clone()]));
        let spec = AttentionSpec {
            k_positions: Positions::new([tokens]),
            ..whole_spec.clone()
        };
        let result = forward(&q, &k, &v, &spec);
        (result, backward(&q, &k, &v, &whole, &grad, &spec))
    };
    let parts = [part(0..cut), part(cut..len)];
    let lse = parts.each_ref().map(|(part, _)| f64s(&part.lse()));
    let out = parts.each_ref().map(|(part, _)| f64s(&part.out));
    let (mut merged_lse, mut merged_out) = (vec![0.0; 2 * len], vec![0.0; 2 * len * 32]);
    for row in 0..2 * len {
        let (head, token) = (row / len, row % len);
        merged_lse[row] = (lse[0][row].exp() + lse[1][row].exp()).ln();
        for d in 0..32 {
            let at = (token * 2 + head) * 32 + d;
            merged_out[at] = (0..2)
                .map(|part| (lse[part][row] - merged_lse[row]).exp() * out[part][at])
                .sum();
        }
    }
    assert!(error(&merged_lse, &f64s(&whole.lse())) <= tolerance);
    assert!(error(&merged_out, &f64s(&whole.out)) <= tolerance);

    let [first, second] = parts.map(|(_, grads)| grads.map(|grad| f64s(&grad)));
    let [dq, dk, dv] = whole_grads.map(|grad| f64s(&grad));
    let sum: Vec<f64> = first[0].iter().zip(&second[0]).map(|(a, b)| a + b).collect();
    assert!(error(&sum, &dq) <= tolerance);
    assert!(error(&[&first[1][..], &second[1]].concat(), &dk) <= tolerance);
    assert!(error(&[&first[2][..], &second[2]].concat(), &dv) <= tolerance);
}

fn all_bytes(inputs: &[Tensor<4>; 4], spec: &AttentionSpec) -> Vec<Vec<u8>> {
    let [q, k, v, grad] = inputs;
    let result = forward(q, k, v, spec);
    let grads = backward(q, k, v, &result, grad, spec);
    let mut all = vec![bytes(&result.out), bytes(&result.stats)];
    all.extend(grads.iter().map(bytes));
    all
}

fn contiguous(view: &Tensor<4>) -> Tensor<4> {
    Tensor::from_data(view.to_data(), (&device(), view.dtype()))
}

#[test]
fn views_give_the_bits_of_their_contiguous_copies() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16]
        .into_iter()
        .filter(|&dtype| able(dtype))
    {
        for [len, heads, dim] in [[1, 1, 1], [70, 1, 1], [1, 3, 16], [70, 2, 2], [270, 2, 24]] {
            let views: [(&str, Tensor<4>); 6] = [
                ("heads first", noise(1, [2, heads, len, dim], dtype).swap_dims(1, 2)),
                (
                    "dims before tokens",
                    noise(2, [2, dim, heads, len], dtype).swap_dims(1, 3),
                ),
                (
                    "one batch for all",
                    noise(3, [1, len, heads, dim], dtype).expand([2, len, heads, dim]),
                ),
                (
                    "one head for all",
                    noise(4, [2, len, 1, dim], dtype).expand([2, len, heads, dim]),
                ),
                (
                    "one token for all",
                    noise(5, [2, 1, heads, dim], dtype).expand([2, len, heads, dim]),
                ),
                (
                    "a slice",
                    noise(6, [3, len + 5, heads + 1, dim + 3], dtype).slice([
                        1..3,
                        2..len + 2,
                        1..heads + 1,
                        2..dim + 2,
                    ]),
                ),
            ];
            let flipped = ("backwards", noise(7, [2, len, heads, dim], dtype).flip([1, 3]));
            let spec = spec(
                Mask::Causal,
                Positions::whole(len),
                Positions::whole(len),
                0.3,
                HeadMap::new(heads, heads),
            );
            for (name, view) in views.into_iter().chain([flipped]) {
                for place in 0..4 {
                    let mut inputs = [8, 9, 10, 11].map(|seed| noise(seed, [2, len, heads, dim], dtype));
                    inputs[place] = view.clone();
                    let of_view = all_bytes(&inputs, &spec);
                    inputs[place] = contiguous(&view);
                    let same = of_view == all_bytes(&inputs, &spec);
                    assert!(same, "{name} as input {place}, {dtype:?} [2, {len}, {heads}, {dim}]");
                }
            }
        }
    }
}

#[test]
fn the_same_bits_every_time_and_from_many_threads_at_once() {
    let inputs = [1, 2, 3, 4].map(|seed| noise(seed, [1, 700, 3, 32], DType::F32));
    let spec = spec(
        Mask::Causal,
        Positions::whole(700),
        Positions::whole(700),
        0.2,
        HeadMap::new(3, 3),
    );
    let expected = all_bytes(&inputs, &spec);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    assert!(all_bytes(&inputs, &spec) == expected);
                }
            });
        }
    });
    // Nor do the bits depend on the number of threads.
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        assert!(pool.install(|| all_bytes(&inputs, &spec)) == expected);
    }
}

#[test]
fn empty_dimensions() {
    for [batch, queries, keys, heads] in [[0, 3, 3, 2], [1, 0, 3, 2], [1, 3, 0, 2], [1, 0, 0, 2], [1, 3, 3, 0]] {
        let q = noise(1, [batch, queries, heads, 4], DType::F32);
        let [k, v] = [2, 3].map(|seed| noise(seed, [batch, keys, heads, 4], DType::F32));
        let map = HeadMap { ratio: 1, offset: 0 };
        let spec = spec(Mask::Full, Positions::whole(queries), Positions::whole(keys), 0.5, map);
        let result = forward(&q, &k, &v, &spec);
        assert_eq!(result.out.dims(), [batch, queries, heads, 4]);
        assert_eq!(result.lse().dims(), [batch, heads, queries]);
        if keys == 0 {
            assert!(f64s(&result.out).iter().all(|&x| x == 0.0));
            assert!(f64s(&result.lse()).iter().all(|&x| x == f64::NEG_INFINITY));
        }
        let [dq, dk, dv] = backward(&q, &k, &v, &result, &q, &spec);
        assert_eq!([dq.dims(), dk.dims(), dv.dims()], [q.dims(), k.dims(), v.dims()]);
        if queries == 0 || keys == 0 {
            assert!([dq, dk, dv].iter().flat_map(f64s).all(|x| x == 0.0));
        }
    }
}

#[test]
fn dead_rows_are_zero_and_leave_no_trace() {
    // Queries 0..100 see nothing of keys 100..400; the rest see some.
    for dtype in [DType::F32, DType::F64, DType::BF16]
        .into_iter()
        .filter(|&dtype| able(dtype))
    {
        let [q, grad] = [1, 2].map(|seed| noise(seed, [1, 400, 2, 16], dtype));
        let [k, v] = [3, 4].map(|seed| noise(seed, [1, 300, 2, 16], dtype));
        let map = HeadMap::new(2, 2);
        let both = spec(
            Mask::Causal,
            Positions::whole(400),
            Positions::new([100..400]),
            0.3,
            map,
        );
        let result = forward(&q, &k, &v, &both);
        let grads = backward(&q, &k, &v, &result, &grad, &both);
        let dead = |tensor: &Tensor<4>| f64s(&tensor.clone().slice([0..1, 0..100]));
        assert!(dead(&result.out).iter().chain(&dead(&grads[0])).all(|&x| x == 0.0));
        let lse = f64s(&result.lse());
        assert!(
            lse.iter()
                .enumerate()
                .all(|(i, &x)| (x == f64::NEG_INFINITY) == (i % 400 < 100))
        );
        assert!(grads.iter().flat_map(f64s).all(f64::is_finite));

        let living = |tensor: &Tensor<4>| tensor.clone().slice([0..1, 100..400]);
        let alone = spec(
            Mask::Causal,
            Positions::new([100..400]),
            Positions::new([100..400]),
            0.3,
            map,
        );
        let (q, grad) = (living(&q), living(&grad));
        let result = forward(&q, &k, &v, &alone);
        let alone = backward(&q, &k, &v, &result, &grad, &alone);
        for (with, without) in grads.iter().zip(&alone).skip(1) {
            let tolerance = if dtype == DType::BF16 { 5e-3 } else { 1e-6 };
            assert!(error(&f64s(with), &f64s(without)) <= tolerance);
        }
    }
}

/// No finite sentinel: scores of -1e6 are scores like others.
#[test]
fn equal_huge_scores_weigh_equally() {
    for sign in [1.0, -1.0] {
        let q = Tensor::<4>::ones([1, 300, 1, 4], &device()) * sign * 1e3;
        let k = Tensor::<4>::ones([1, 300, 1, 4], &device()) * 250.0;
        let v = noise(1, [1, 300, 1, 4], DType::F32);
        let spec = spec(
            Mask::Full,
            Positions::whole(300),
            Positions::whole(300),
            1.0,
            HeadMap::new(1, 1),
        );
        let result = forward(&q, &k, &v, &spec);
        let mean = f64s(&v.mean_dim(1));
        for (i, x) in f64s(&result.out).into_iter().enumerate() {
            assert!((x - mean[i % 4]).abs() < 1e-5);
        }
        assert!(
            f64s(&result.lse())
                .into_iter()
                .all(|x| (x - sign * 1e6 - 300f64.ln()).abs() < 0.1)
        );
    }
}
