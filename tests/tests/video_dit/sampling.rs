//! Sampling with a cache: what a masked forward pass of the whole video computes, and the same videos on every mesh.

use burn::tensor::{DType, Tensor, TensorData};
use burn_sp::attention::KvMove;
use burn_sp::comm::Parts;
use burn_sp::layout::{Axis, MeshShape, Placement, Split};
use burn_sp::{SpDevice, SpTensor};
use burn_sp_models::video_dit::{
    FrameBlocks, Solver, VideoCache, VideoGrid, VideoInput, VideoKey, VideoMask, VideoOptions, VideoSamplerConfig,
};
use burn_sp_tests::cast;

use super::tiny;
use crate::common::{f64s, largest, mesh, near, ranks, token_meshes};

const GRID: VideoGrid = VideoGrid {
    frames: 7,
    rows: 1,
    columns: 3,
};

fn meshes() -> Vec<MeshShape> {
    let others = [
        MeshShape::default(),
        mesh(2, 2, 1),
        MeshShape::tp(2),
        MeshShape::tp(2).with_ulysses(2),
        MeshShape::tp(2).with_ring(2),
    ];
    token_meshes().into_iter().chain(others).collect()
}

fn sampling_device(device: &SpDevice) -> SpDevice {
    SpDevice::new(device.device().clone().inner(), device.mesh().clone())
}

fn whole(tensor: SpTensor<3>) -> Vec<f64> {
    f64s(
        &tensor
            .redistribute(Axis::Tp, Placement::Replicate)
            .gather()
            .into_local(),
    )
}

/// The velocities of all frames, in one pass under a mask.
fn at_once(mask: VideoMask, grid: VideoGrid) -> Vec<f64> {
    let of = |device: SpDevice| {
        let device = sampling_device(&device);
        let on = (device.device(), DType::F64);
        let latents = Tensor::<5>::from_data(tiny::latents(31, 2, &grid, 1), on);
        let text = Tensor::<3>::from_data(tiny::text(2), on);
        let input = VideoInput::partition(grid, latents, tiny::times(2, &grid, 1), text, &device);
        let options = VideoOptions {
            mask,
            ..VideoOptions::default()
        };
        whole(tiny::model(DType::F64).forward(&input, &options))
    };
    ranks(MeshShape::default(), of).swap_remove(0)
}

/// The same, block after block through a cache; each comes twice, with other latents at first.
fn block_by_block(blocks: FrameBlocks, video: VideoGrid, cache: VideoCache, mesh: MeshShape, kv: KvMove) -> Vec<f64> {
    let of = |device: SpDevice| {
        let (device, mut cache) = (sampling_device(&device), cache.clone());
        let on = (device.device(), DType::F64);
        let latents = Tensor::<5>::from_data(tiny::latents(31, 2, &video, 1), on);
        let text = Tensor::<3>::from_data(tiny::text(2), on);
        let times: Vec<f64> = tiny::times(2, &video, 1).iter().collect();
        let (model, _) = tiny::model(DType::F64).shard(&device);
        let options = VideoOptions {
            kv,
            ..VideoOptions::default()
        };
        let found = (0..blocks.count(video.frames)).map(|block| {
            let frames = blocks.range(block, video.frames);
            let grid = VideoGrid {
                frames: frames.len(),
                ..GRID
            };
            let own = (0..2).flat_map(|sample| times[sample * video.frames..][frames.clone()].to_vec());
            let times = TensorData::new(own.collect::<Vec<f64>>(), [2, frames.len()]);
            let own = latents.clone().slice_dim(2, frames.clone());
            let [noisy, clean] = [own.clone() * 2.0, own].map(|latents| {
                let input = VideoInput::partition(grid, latents, times.clone(), text.clone(), &device);
                whole(model.forward_cached(&input, frames.start, &mut cache, &options))
            });
            assert_ne!(noisy, clean);
            clean
        });
        let blocks: Vec<Vec<f64>> = found.collect();
        // By sample first.
        let of = |sample: usize| {
            blocks
                .iter()
                .flat_map(move |block| block[sample * block.len() / 2..][..block.len() / 2].to_vec())
        };
        (0..2).flat_map(of).collect::<Vec<f64>>()
    };
    ranks(mesh, of).swap_remove(0)
}

/// A window of `w` frames in all, `s` of them the first, is the mask's window of `w - s` beside the sink.
#[test]
fn a_cache_shows_what_the_mask_does() {
    let (two, image) = (FrameBlocks::new(2), FrameBlocks::new(2).with_image_first());
    let three = FrameBlocks::new(3);
    let cases = [
        // The last block is shorter: a mask's window counts from where it would end.
        (two, 7, None, 0),
        (image, 7, None, 0),
        (two, 6, Some(4), 0),
        (two, 6, Some(4), 1),
        // The window's end cuts a block, and the sink one too.
        (image, 7, Some(5), 2),
        (three, 9, Some(4), 1),
        (three, 9, Some(7), 2),
        (FrameBlocks::new(1), 7, Some(3), 1),
        (FrameBlocks::new(1), 7, Some(1), 0),
    ];
    for (blocks, frames, window, sink) in cases {
        let mask = match window {
            None => VideoMask::block_causal(blocks),
            Some(window) => VideoMask::local(blocks, window - sink, sink),
        };
        let grid = VideoGrid { frames, ..GRID };
        let expected = at_once(mask, grid);
        let scale = largest(&expected);
        for mesh in meshes() {
            for kv in [KvMove::Ring, KvMove::Gather] {
                let found = block_by_block(blocks, grid, VideoCache::new(2, window, sink), mesh, kv);
                let what = format!("{blocks:?}, window {window:?}, sink {sink}, {mesh}, {kv:?}");
                near(&found, &expected, 64.0 * f64::EPSILON * scale, &what);
            }
        }
    }
}

struct Made {
    config: VideoSamplerConfig,
    /// Frames that are given.
    given: usize,
    dtype: DType,
}

impl Made {
    /// Two videos, in three blocks, and the most bytes that a rank's cache had.
    fn on(&self, mesh: MeshShape) -> (Vec<f64>, usize) {
        let of = |device: SpDevice| {
            let device = sampling_device(&device);
            let on = (device.device(), self.dtype);
            let cast_data = |data: TensorData| data.convert_dtype(self.dtype);
            let text = Tensor::<3>::from_data(cast_data(tiny::text(2)), on);
            let (model, _) = cast(tiny::model(DType::F64), self.dtype).shard(&device);
            let key = VideoKey { seed: 4, step: 0 };
            let mut sampler = self.config.init([GRID.rows, GRID.columns], 2, key, &device);
            let options = VideoOptions::default();
            let mut video = Vec::new();
            if self.given > 0 {
                let grid = VideoGrid {
                    frames: self.given,
                    ..GRID
                };
                let latents = Tensor::<5>::from_data(cast_data(tiny::latents(33, 2, &grid, 1)), on);
                sampler.give(&model, latents, text.clone(), &options);
            }
            for frames in [3, 3, 1] {
                video.extend(whole(sampler.next_block(&model, frames, text.clone(), &options)));
            }
            assert_eq!(sampler.frames(), self.given + 7);
            (video, sampler.cache_bytes())
        };
        let mut all = ranks(mesh, of);
        let most = all.iter().map(|(_, bytes)| *bytes).max().expect("ranks");
        (all.swap_remove(0).0, most)
    }
}

fn configs() -> Vec<VideoSamplerConfig> {
    let four = || VideoSamplerConfig::new().with_steps(4);
    vec![
        four().with_solver(Solver::Euler),
        four(),
        four().with_guidance(2.5),
        four().with_window(Some(5)).with_sink(1),
    ]
}

#[test]
fn all_meshes_make_the_same_videos() {
    for config in configs() {
        for given in [0, 1] {
            let made = Made {
                config: config.clone(),
                given,
                dtype: DType::F64,
            };
            let (one, _) = made.on(MeshShape::default());
            let scale = largest(&one);
            for mesh in meshes() {
                let what = format!("{config:?}, {given} given, {mesh}");
                near(&made.on(mesh).0, &one, 1e-11 * scale, &what);
            }
        }
    }
}

/// Up to what f32 holds: 1e-3 was asked for.
#[test]
fn videos_in_f32_are_the_same_too() {
    let made = |dtype| Made {
        config: configs().swap_remove(1),
        given: 0,
        dtype,
    };
    let (truth, _) = made(DType::F64).on(MeshShape::default());
    let scale = largest(&truth);
    for mesh in meshes() {
        near(&made(DType::F32).on(mesh).0, &truth, 1e-4 * scale, &format!("{mesh}"));
    }
}

/// A model in bf16 has 8 bits; what it is stepped with has not: noise, latents and their differences stay in f32.
#[test]
fn narrow_models_make_much_the_same_videos() {
    let made = |dtype| Made {
        config: configs().swap_remove(1),
        given: 1,
        dtype,
    };
    let (truth, _) = made(DType::F64).on(MeshShape::default());
    let scale = largest(&truth);
    for mesh in [MeshShape::default(), mesh(1, 1, 2), mesh(1, 2, 1), MeshShape::tp(2)] {
        let (found, _) = made(DType::BF16).on(mesh);
        near(&found, &truth, 0.03 * scale, &format!("{mesh}"));
        // More digits than bf16 holds.
        let rounded = |value: &f64| f64::from(burn::tensor::bf16::from_f64(*value));
        assert!(found.iter().any(|value| rounded(value) != *value), "{mesh}");
    }
}

/// A split made for the sequences of training does not concern it.
#[test]
fn a_samplers_tokens_are_its_own() {
    let of = |device: SpDevice| {
        let device = sampling_device(&device).with_ring_split(Split::Explicit(Parts::contiguous(42, 2)));
        let on = (device.device(), DType::F64);
        let text = Tensor::<3>::from_data(tiny::text(2), on);
        let key = VideoKey { seed: 4, step: 0 };
        let mut sampler = configs()[0].init([GRID.rows, GRID.columns], 2, key, &device);
        whole(sampler.next_block(&tiny::model(DType::F64), 3, text, &VideoOptions::default()))
    };
    assert_eq!(ranks(mesh(1, 2, 1), of)[0].len(), 2 * 9 * 12);
}

/// What the cache keeps is shared out: the heads over ulysses and tp, the tokens over the ring; and it stops growing at the
/// window.
#[test]
fn ranks_share_the_cache() {
    let bytes = |config: &VideoSamplerConfig, mesh| {
        let made = Made {
            config: config.clone(),
            given: 0,
            dtype: DType::F32,
        };
        made.on(mesh).1
    };
    let config = &configs()[0];
    // Keys and values of 2 samples, 7 frames of 3 tokens, 24 features, in 2 layers.
    let all = 2 * 2 * 21 * 24 * 4 * 2;
    assert_eq!(bytes(config, MeshShape::default()), all);
    // 2 of 3 heads; 12 of 21 tokens, block by block.
    assert_eq!(bytes(config, mesh(1, 1, 2)), all * 2 / 3);
    assert_eq!(bytes(config, MeshShape::tp(2)), all * 2 / 3);
    assert_eq!(bytes(config, mesh(1, 2, 1)), all * 12 / 21);
    assert_eq!(bytes(config, mesh(2, 1, 1)), all / 2);
    let windowed = &configs()[3];
    assert_eq!(bytes(windowed, MeshShape::default()), all * 5 / 7);
}

#[test]
fn what_cannot_work_is_refused() {
    let failure = |frames: &'static [(usize, usize)], window: Option<usize>| {
        crate::common::failure(MeshShape::default(), move |device| {
            let (device, mut cache) = (sampling_device(&device), VideoCache::new(2, window, 1));
            let on = (device.device(), DType::F64);
            for (first, count) in frames {
                let grid = VideoGrid { frames: *count, ..GRID };
                let latents = Tensor::<5>::from_data(tiny::latents(31, 1, &grid, 1), on);
                let text = Tensor::<3>::from_data(tiny::text(1), on);
                let input = VideoInput::partition(grid, latents, tiny::times(1, &grid, 1), text, &device);
                let model = tiny::model(DType::F64);
                let _velocity = model.forward_cached(&input, *first, &mut cache, &VideoOptions::default());
            }
        })
    };
    let found = failure(&[(0, 2), (3, 1)], None);
    assert!(found.contains("frames 3..4 come after 0..2"), "{found}");
    // The end alone is not the block.
    let found = failure(&[(0, 2), (1, 1)], None);
    assert!(found.contains("frames 1..2 come after 0..2"), "{found}");
    let found = failure(&[(0, 3)], Some(3));
    assert!(
        found.contains("a block of 3 frames does not fit into a window of 3"),
        "{found}"
    );
    let found = crate::common::failure(mesh(2, 1, 1), |device| {
        let key = VideoKey { seed: 4, step: 0 };
        drop(configs()[0].init([1, 3], 1, key, &device));
    });
    assert!(found.contains("1 samples on 2 data-parallel ranks"), "{found}");
    let problem = |config: VideoSamplerConfig| config.problem().expect("a problem");
    assert!(problem(VideoSamplerConfig::new().with_steps(0)).contains("use at least 1"));
    assert!(problem(VideoSamplerConfig::new().with_window(Some(2)).with_sink(2)).contains("a window of 2 frames"));
    assert!(problem(VideoSamplerConfig::new().with_guidance(f64::NAN)).contains("a guidance of NaN"));
}
