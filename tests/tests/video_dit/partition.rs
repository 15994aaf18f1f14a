//! A batch shared out by tokens (oracle O2): every token is the patch of its frame, row and column.

use burn::tensor::{DType, Tensor, TensorData};
use burn_sp::SpDevice;
use burn_sp::layout::{Axis, MeshShape, Placement, Split};
use burn_sp_models::video_dit::{
    FrameBlocks, VideoDit, VideoGrid, VideoInput, VideoMask, VideoOptions, from_output_patches, input_patches,
    output_patches,
};

use super::tiny;
use crate::common::{contains, f64s, failure, mesh, ranks, tensor};

/// `1e4 frame + 100 height + width` in the first channel, that plus 1e6 in the second: no two latents are equal.
fn latents(grid: &VideoGrid, device: &SpDevice) -> Tensor<5> {
    let shape = [1, 2, grid.frames, 2 * grid.rows, 2 * grid.columns];
    let [_, _, frames, height, width] = shape;
    let value = |i: usize| {
        let (channel, frame) = (i / (frames * height * width), i / (height * width) % frames);
        (1_000_000 * channel + 10_000 * frame + 100 * (i / width % height) + i % width) as f64
    };
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    tensor(&values, shape, DType::F64, device.device())
}

fn partition(grid: VideoGrid, latents: Tensor<5>, device: &SpDevice) -> VideoInput {
    let frames = latents.dims()[2];
    let times = TensorData::zeros::<f32, _>([1, frames]);
    let text = Tensor::zeros([1, 4, 5], (device.device(), DType::F64));
    VideoInput::partition(grid, latents, times, text, device)
}

/// Case 24: positions by un-flattening the global token index, contiguous and zigzag.
#[test]
fn a_token_is_the_patch_of_its_place() {
    let grid = VideoGrid {
        frames: 2,
        rows: 2,
        columns: 3,
    };
    for shape in [mesh(1, 1, 4), mesh(1, 4, 1), mesh(1, 2, 2), mesh(1, 5, 1)] {
        for split in [Split::Contiguous, Split::Zigzag] {
            ranks(shape, |device| {
                let device = device.with_ring_split(split.clone());
                let input = partition(grid, latents(&grid, &device), &device);
                let positions: Vec<usize> = input.patches.positions(1).iter().collect();
                if shape == mesh(1, 1, 4) {
                    let [frame, row] = [device.rank() / 2, device.rank() % 2];
                    let located: Vec<_> = positions.iter().map(|position| grid.locate(*position)).collect();
                    assert_eq!(located, [[frame, row, 0], [frame, row, 1], [frame, row, 2]]);
                }
                let patch = |position: &usize| {
                    let [frame, row, column] = grid.locate(*position);
                    let base = 10_000 * frame + 100 * 2 * row + 2 * column;
                    [0, 1, 100, 101, 1_000_000, 1_000_001, 1_000_100, 1_000_101].map(|at| (base + at) as f64)
                };
                let expected: Vec<f64> = positions.iter().flat_map(patch).collect();
                assert_eq!(
                    f64s(input.patches.local()),
                    expected,
                    "{shape}, {split}, rank {}",
                    device.rank()
                );
            });
        }
    }
}

/// Case 24: zigzag over two ranks.
#[test]
fn zigzag_positions() {
    let grid = VideoGrid {
        frames: 8,
        rows: 1,
        columns: 1,
    };
    let found = ranks(mesh(1, 2, 1), |device| {
        let input = partition(grid, latents(&grid, &device), &device);
        input.patches.positions(1).iter().collect::<Vec<_>>()
    });
    assert_eq!(found, [[0, 1, 6, 7], [2, 3, 4, 5]]);
}

/// Case 16: 12 tokens on 4 ranks, and the gradient of slicing.
#[test]
fn the_gradient_of_a_partition_is_whole() {
    let grid = VideoGrid {
        frames: 3,
        rows: 2,
        columns: 2,
    };
    for shape in [mesh(1, 1, 4), mesh(1, 4, 1), mesh(1, 2, 2)] {
        let terms = ranks(shape, |device| {
            let latents = latents(&grid, &device).require_grad();
            let input = partition(grid, latents.clone(), &device);
            assert_eq!(input.patches.local().dims(), [1, 3, 8]);
            let grads = input.patches.into_local().sum().backward();
            f64s(&latents.grad(&grads).expect("a gradient"))
        });
        let sum: Vec<f64> = (0..terms[0].len())
            .map(|i| terms.iter().map(|term| term[i]).sum())
            .collect();
        assert_eq!(sum, vec![1.0; 2 * 3 * 4 * 4], "{shape}");
    }
}

#[test]
fn patches_go_back_where_they_came_from() {
    ranks(MeshShape::default(), |device| {
        let grid = VideoGrid {
            frames: 2,
            rows: 2,
            columns: 3,
        };
        let latents = latents(&grid, &device);
        let back = from_output_patches(output_patches(latents.clone(), 2), &grid, 2);
        assert_eq!(f64s(&back), f64s(&latents));
        // Channels are first in what the model reads, last in what it writes.
        let [read, written] = [input_patches(latents.clone(), 2), output_patches(latents, 2)];
        assert_eq!(f64s(&read)[..5], [0.0, 1.0, 100.0, 101.0, 1e6]);
        assert_eq!(f64s(&written)[..5], [0.0, 1e6, 1.0, 1_000_001.0, 100.0]);
    });
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let grid = VideoGrid {
        frames: 2,
        rows: 1,
        columns: 2,
    };
    let forward = |input: VideoInput, mask: VideoMask| {
        let model: VideoDit = tiny::model(DType::F64);
        let options = VideoOptions {
            mask,
            ..VideoOptions::default()
        };
        model.forward(&input, &options);
    };
    let input = |device: &SpDevice| partition(grid, latents(&grid, device), device);
    let forcing = VideoMask::teacher_forcing(FrameBlocks::new(1));
    let report = failure(mesh(1, 1, 1), |device| forward(input(&device), forcing));
    contains(&report, &["4 tokens", "wants 2 times the 4 of"]);
    let report = failure(mesh(1, 1, 1), |device| {
        let times = TensorData::zeros::<f32, _>([1, 3]);
        forward(
            VideoInput {
                times,
                ..input(&device)
            },
            VideoMask::Full,
        );
    });
    contains(&report, &["the times are [1, 3]", "[1, 2]"]);
    let report = failure(mesh(1, 1, 1), |device| {
        let high = VideoGrid { rows: 3, ..grid };
        drop(partition(high, latents(&grid, &device), &device));
    });
    contains(&report, &["2 frames of 2 x 4 latents are not square patches of"]);
    let report = failure(mesh(1, 1, 2), |device| {
        let whole = input(&device);
        let partial = VideoInput {
            patches: whole.patches.redistribute(Axis::Ulysses, Placement::Partial),
            ..whole
        };
        forward(partial, VideoMask::Full);
    });
    contains(&report, &["partial"]);
}
