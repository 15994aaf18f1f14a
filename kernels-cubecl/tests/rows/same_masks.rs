//! Dropout on the device has the bits of dropout on the CPU.

use burn::tensor::{DType, Device};
use kernels_cubecl::{DropoutSpec, Positions, dropout};

use crate::support::*;

/// A global shape, and the local positions in each dimension.
type Case = ([usize; 3], [Vec<std::ops::Range<usize>>; 3]);

#[test]
fn masks_and_values_have_the_bits_of_the_cpu() {
    // Ranges of each dimension of the global shape; indices reach beyond 32 bits, and a run across that border.
    let cases: [Case; 7] = [
        ([3, 20, 64], [vec![0..3], vec![0..20], vec![0..64]]),
        ([3, 20, 64], [vec![0..3], vec![2..7, 12..16], vec![0..64]]),
        ([2, 9, 50], [vec![1..2], vec![0..9], vec![3..20]]),
        ([2, 9, 51], [vec![0..2], vec![0..4, 6..9], vec![0..51]]),
        ([2, 7, 30], [vec![0..2], vec![1..3, 5..6], vec![4..8, 20..27]]),
        (
            [5, 1 << 20, 4096],
            [vec![0..1, 4..5], vec![7..9, 1_000_000..1_000_003], vec![0..4096]],
        ),
        (
            [2, 1 << 20, 4101],
            [vec![0..2], vec![1_047_295..1_047_300], vec![0..4101]],
        ),
    ];
    for (shape, ranges) in cases {
        let positions: Vec<Positions> = ranges.into_iter().map(Positions::new).collect();
        let local: [usize; 3] = std::array::from_fn(|dim| positions[dim].len());
        let spec = DropoutSpec {
            probability: 0.37,
            seed: 0x1234_5678_9abc_def0,
            stream: 0xfeed_0000_0000_0007,
            shape: shape.to_vec(),
            positions,
        };
        for dtype in dtypes() {
            let run = |device: &Device| {
                let x = tensor(noise(local.iter().product(), 3), local, dtype, device);
                dropout(x, spec.clone()).into_data()
            };
            // Bits, so that -0 is not 0.
            assert_eq!(
                run(&device()).as_bytes(),
                run(&Device::flex()).as_bytes(),
                "{dtype:?} {spec:?}"
            );
            assert_eq!(run(&device()).dtype(), dtype);
        }
    }
}

#[test]
fn the_zeros_of_an_infinite_tensor_are_those_of_the_mask() {
    let shape = [4, 33];
    let spec = crate::dropout::whole(&shape, 0.5);
    let run = |device: &Device| {
        let x = tensor(vec![f64::INFINITY; 132], shape, DType::F32, device);
        values(dropout(x, spec.clone()))
    };
    assert_eq!(run(&device()), run(&Device::flex()));
}
