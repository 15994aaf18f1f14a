//! Dropout by the counter-based generator.

use burn::tensor::{DType, Tensor};
use kernels_cubecl::{DropoutSpec, Positions, dropout, philox::Philox};

use crate::support::*;

pub fn whole(shape: &[usize], probability: f64) -> DropoutSpec {
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
    let ones = tensor(vec![1.0; len], shape, DType::F32, &device());
    values(dropout(ones, spec.clone()))
}

#[test]
fn dropout_follows_the_generator() {
    let spec = whole(&[3, 5, 77], 0.3);
    let philox = Philox::new(spec.seed, spec.stream);
    for dtype in dtypes() {
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

#[test]
#[should_panic(expected = "dropout: the probability is 1, expected one in [0, 1)")]
fn dropout_refuses_to_drop_all() {
    mask(&whole(&[1, 2, 3], 1.0));
}

#[test]
#[should_panic(expected = "dropout: the positions are those of a [1, 2, 3], expected [1, 2, 4] (x is F32 [1, 2, 4])")]
fn dropout_refuses_positions_of_another_shape() {
    dropout(Tensor::<3>::ones([1, 2, 4], &device()), whole(&[1, 2, 3], 0.5));
}

#[test]
#[should_panic(expected = "dropout: there are positions up to 9 in dimension 1, past the global shape [1, 2, 3]")]
fn dropout_refuses_positions_past_the_global_shape() {
    let mut spec = whole(&[1, 2, 3], 0.5);
    spec.positions[1] = Positions::new([8..9]);
    mask(&spec);
}
