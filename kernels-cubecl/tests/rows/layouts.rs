//! All kernels: layouts, dtypes, threads, empty tensors.

use burn::backend::{DispatchKindConversion, DispatchTensor, Flex, tensor::FloatTensor};
use burn::tensor::{DType, Device, Tensor};
use kernels_cubecl::{Kernels, RotaryStyle, gelu, layer_norm, rms_norm, swiglu};

use crate::{cross_entropy::cross_entropy_on, dropout::whole, support::*};

/// Every result of every kernel of a backend on `[batch, tokens, heads, features]` inputs.
fn all_kernels<B: Kernels>(inputs: [Tensor<4>; 3]) -> Vec<(&'static str, Vec<f64>)>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let [x4, z4, grad4] = inputs;
    let [batch, tokens, heads, len] = x4.dims();
    let (dtype, device) = (x4.dtype(), x4.device());
    // Clones share their buffer, `raw_of` of a fresh copy does not: both ways of writing the output get their turn.
    let [x, z, grad] = [x4.clone(), z4, grad4].map(|tensor| move || raw_of::<B, 4>(tensor.clone()));
    let vector = |seed| raw_of::<B, 1>(tensor(noise(len, seed), [len], dtype, &device));
    let flat = |tensor: FloatTensor<B>| values(wrap_of::<B, 4>(tensor));
    let line = |tensor: FloatTensor<B>| values(wrap_of::<B, 1>(tensor));
    let mut found = Vec::new();

    let (y, mean, inverse_std) = B::layer_norm_forward(x(), vector(11), vector(12), 1e-5);
    let (dx, dweight, dbias) = B::layer_norm_backward(x(), vector(11), mean.clone(), inverse_std.clone(), grad());
    found.push(("layer_norm y", flat(y)));
    found.push(("layer_norm mean", line(mean)));
    found.push(("layer_norm inverse_std", line(inverse_std)));
    found.push(("layer_norm dx", flat(dx)));
    found.push(("layer_norm dweight", line(dweight)));
    found.push(("layer_norm dbias", line(dbias)));

    let (y, inverse_rms) = B::rms_norm_forward(x(), vector(11), 1e-5);
    let (dx, dweight) = B::rms_norm_backward(x(), vector(11), inverse_rms.clone(), grad());
    found.push(("rms_norm y", flat(y)));
    found.push(("rms_norm inverse_rms", line(inverse_rms)));
    found.push(("rms_norm dx", flat(dx)));
    found.push(("rms_norm dweight", line(dweight)));

    let (dgate, dup) = B::swiglu_backward(x(), z(), grad());
    found.push(("swiglu y", flat(B::swiglu_forward(x(), z()))));
    found.push(("swiglu dgate", flat(dgate)));
    found.push(("swiglu dup", flat(dup)));

    found.push(("gelu y", flat(B::gelu_tanh_forward(x()))));
    found.push(("gelu dx", flat(B::gelu_tanh_backward(x(), grad()))));

    let table = |seed| {
        raw_of::<B, 2>(tensor(
            noise(tokens * (len / 2), seed),
            [tokens, len / 2],
            wide(dtype),
            &device,
        ))
    };
    for style in [RotaryStyle::Halves, RotaryStyle::Interleaved] {
        found.push(("rotary", flat(B::rotary(x(), table(13), table(14), style, true))));
    }
    found.push((
        "dropout",
        flat(B::dropout(x(), &whole(&[batch, tokens, heads, len], 0.3))),
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
    let (losses, dlogits) = cross_entropy_on::<B>(logits, &targets, weights);
    found.push(("cross_entropy losses", losses));
    found.push(("cross_entropy dlogits", dlogits));
    found
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
    for dtype in dtypes() {
        for (name, shape, view) in views {
            let views = [1, 2, 3].map(|seed| view(sample(shape, dtype, seed)));
            let copies = (views.clone()).map(|view| tensor(values(view.clone()), view.dims(), dtype, &device()));
            let expected = all_kernels::<Raw>(copies);
            for ((kernel, found), (_, expected)) in all_kernels::<Raw>(views).into_iter().zip(expected) {
                assert_eq!(found, expected, "{kernel}, {name}, {dtype:?}");
            }
        }
    }
}

#[test]
fn overwriting_gives_the_bits_of_a_fresh_output() {
    let make = |seed| raw(sample([40, 1000], DType::F32, seed));
    let vector = |seed| raw(sample([1000], DType::F32, seed));
    let run = |x: Float, grad: Float| {
        let (y, mean, inverse_std) = Raw::layer_norm_forward(x, vector(3), vector(4), 1e-5);
        let (dx, dweight, dbias) = Raw::layer_norm_backward(make(1), vector(3), mean, inverse_std, grad);
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
    for dtype in among([DType::F32, DType::BF16, DType::F16]) {
        let inputs = [1, 2, 3].map(|seed| sample([2, 7, 3, 132], dtype, seed));
        let exact = (inputs.clone()).map(|input| tensor(values(input), [2, 7, 3, 132], DType::F64, &Device::flex()));
        let exact = all_kernels::<Flex>(exact);
        for ((kernel, found), (_, exact)) in all_kernels::<Raw>(inputs).into_iter().zip(exact) {
            // Weights, statistics and the random vectors are themselves rounded to the dtype here.
            assert_close(&format!("{kernel}, {dtype:?}"), &found, &exact, 4.0 * rounding(dtype));
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let run = || all_kernels::<Raw>([1, 2, 3].map(|seed| sample([2, 150, 3, 130], DType::F32, seed)));
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
    for dtype in dtypes() {
        for shape in [[0, 5, 3, 8], [2, 0, 3, 8], [2, 5, 0, 8], [2, 5, 3, 0]] {
            for (kernel, found) in all_kernels::<Raw>([1, 2, 3].map(|seed| sample(shape, dtype, seed))) {
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
    let device = device().autodiff();
    let x = Tensor::<2>::zeros([0, 8], &device).require_grad();
    let weight = Tensor::<1>::ones([8], &device).require_grad();
    let y = layer_norm(x.clone(), weight.clone(), weight.clone(), 1e-5);
    let grads = gelu(swiglu(rms_norm(y, weight.clone(), 1e-5), x.clone()))
        .sum()
        .backward();
    assert_eq!(x.grad(&grads).unwrap().dims(), [0, 8]);
    assert_eq!(values(weight.grad(&grads).unwrap()), [0.0; 8]);
}
