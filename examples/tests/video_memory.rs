//! Memory a rank of the causal video VAE falls with the number of ranks: encoding, decoding and training. A sampler's cache
//! holds what it says, and no more.

use std::ops::Range;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::LossShare;
use burn_sp::{LaunchConfig, SpDevice, SpTensor, launch_module, seeded};
use burn_sp_examples::memory::{Tracking, enter};
use burn_sp_models::vae::{Vae, VaeConfig};
use burn_sp_models::video_dit::{VideoDitConfig, VideoKey, VideoOptions, VideoSamplerConfig};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

/// So many that two frames are few: 96 latents are 381 frames.
const LATENTS: usize = 96;
/// Pixels of a row, and of a column.
const SIZE: usize = 16;

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    /// Frames are shared out, and layers exchange halos.
    Encode,
    /// The same of latents.
    Decode,
    /// Encodes, decodes, and goes back.
    Train,
    /// Each rank encodes the raw frames that its latents depend on.
    EncodeSlice,
}

fn config() -> VaeConfig {
    VaeConfig {
        base_channels: 4,
        decoder_channels: 4,
        latent_channels: 4,
        multipliers: vec![1, 1, 2, 2],
        latent_mean: vec![0.0; 4],
        latent_std: vec![1.0; 4],
        ..VaeConfig::wan21()
    }
}

/// `[1, channels, frames, size, size]`
fn numbers(channels: usize, frames: usize, size: usize, device: &SpDevice) -> Tensor<5> {
    let shape = [1, channels, frames, size, size];
    let count = shape.iter().product::<usize>() as i64;
    Tensor::<1, Int>::arange(0..count, device.device())
        .float()
        .sin()
        .reshape(shape)
}

/// A rank's frames of a clip of pixels, or of latents.
fn sharded(channels: usize, size: usize, len: usize, split: Split, device: &SpDevice) -> SpTensor<5> {
    let own = split
        .parts(len, device.mesh().size(Axis::Ulysses))
        .len_of(device.rank());
    let layout = Layout::replicated([1, channels, len, size, size]).shard(2, Axis::Ulysses, split);
    SpTensor::from_local(numbers(channels, own, size, device), layout, device)
}

fn run(work: Work, latents: usize, vae: &Vae, device: &SpDevice) {
    let ranks = device.mesh().size(Axis::Ulysses);
    let frames = vae.frames_of(0..latents).end;
    let clip = || sharded(3, SIZE, frames, vae.frame_split(latents, ranks), device);
    match work {
        Work::Encode => drop(vae.encode(clip())),
        Work::Decode => {
            let latents = sharded(4, SIZE / vae.spatial_stride, latents, Split::Contiguous, device);
            drop(vae.decode(latents));
        }
        Work::Train => {
            let decoded = vae.decode(vae.encode(clip()));
            drop(LossShare::mean(decoded.clone().mul(decoded)).backward());
        }
        Work::EncodeSlice => {
            let slice = vae.slice(own_latents(latents, ranks, device.rank()), vae.least_halo());
            let slice = slice.expect("the least halo will do");
            drop(vae.encode_slice(numbers(3, slice.frames.len(), SIZE, device), &slice, device));
        }
    }
}

fn own_latents(latents: usize, ranks: usize, rank: usize) -> Range<usize> {
    Split::Contiguous.parts(latents, ranks).of(rank)[0].clone()
}

/// The most bytes that each rank held at once, input included, weights not. What workers of the thread pool take for a tile
/// of a convolution counts for no rank, and what gemm keeps for a thread, as much as an L2 cache holds, is there before.
fn peaks(work: Work, latents: usize, ranks: usize) -> Vec<usize> {
    let launch = LaunchConfig::new(MeshShape::ulysses(ranks)).with_timeout(Duration::from_secs(60));
    let device = match work {
        Work::Train => Device::flex().autodiff(),
        _ => Device::flex(),
    };
    let vae = seeded(&Device::flex(), 1, |device| config().init(device)).train();
    let found = launch_module(&launch, &device, vae, |device, vae| {
        let account = enter(device.rank());
        run(work, ranks, &vae, &device);
        // What peers still read has gone by then.
        device.mesh().world().barrier().expect("all ranks come");
        let before = account.live();
        account.reset_peak();
        run(work, latents, &vae, &device);
        account.peak() - before
    });
    found.unwrap_or_else(|error| panic!("{work:?} on {ranks}: {error}"))
}

/// A rank needs what one alone would for a clip as long as its part, and two frames more in each layer: at most as large a
/// part of its own as two latents are. A tensor that a peer has not taken yet is copied, where it would be overwritten.
fn of_shared_frames(work: Work) {
    let one = peaks(work, LATENTS, 1)[0] as f64;
    // Backward has 10 MB whatever the clip's length, here of 138 MB.
    let fixed = if work == Work::Train { 0.06 } else { 0.01 };
    for ranks in [2, 4] {
        let own = peaks(work, LATENTS / ranks, 1)[0] as f64 / one;
        let context = format!("{work:?} on {ranks}");
        assert!(own <= 1.0 / ranks as f64 + fixed, "{context}: {own} of the whole");
        for (rank, peak) in peaks(work, LATENTS, ranks).into_iter().enumerate() {
            let found = peak as f64 / one;
            assert!(
                found <= own + 3.0 / LATENTS as f64,
                "{context}, rank {rank}: {found} of the whole, a clip of its own {own}"
            );
        }
    }
}

/// A rank that exchanges nothing needs memory for all the frames that its latents depend on: 108 frames more.
fn of_slices() {
    let one = peaks(Work::EncodeSlice, LATENTS, 1)[0] as f64;
    let vae = config().init(&Device::flex());
    let whole = vae.frames_of(0..LATENTS).end;
    for ranks in [2, 4] {
        for (rank, peak) in peaks(Work::EncodeSlice, LATENTS, ranks).into_iter().enumerate() {
            let slice = vae.slice(own_latents(LATENTS, ranks, rank), vae.least_halo());
            let frames = slice.expect("the least halo will do").frames.len();
            let (found, expected) = (peak as f64 / one, frames as f64 / whole as f64);
            assert!(
                (found - expected).abs() <= 0.02,
                "rank {rank} of {ranks}: {found} of the whole, of its frames {expected}"
            );
        }
    }
}

/// Frames of a video grow, the bytes beyond the cache do not: no queries stay.
fn of_caches(mesh: MeshShape) {
    let config = VideoDitConfig {
        text_dim: 8,
        ..VideoDitConfig::new(3, 64, 64, 4, 2)
    };
    let model = seeded(&Device::flex(), 1, |device| config.init(device));
    let launch = LaunchConfig::new(mesh).with_timeout(Duration::from_secs(60));
    let found = launch_module(&launch, &Device::flex(), model, |device, model| {
        let account = enter(device.rank());
        let text = Tensor::<3>::ones([1, 4, 8], device.device());
        let sampler = VideoSamplerConfig::new()
            .with_steps(2)
            .with_window(Some(6))
            .with_sink(1);
        let mut sampler = sampler.init([8, 8], 1, VideoKey { seed: 1, step: 0 }, &device);
        let mut beyond = || {
            drop(sampler.next_block(&model, 2, text.clone(), &VideoOptions::default()));
            // What peers still read has gone by then.
            device.mesh().world().barrier().expect("all ranks come");
            (
                sampler.cache_bytes(),
                account.live() as i64 - sampler.cache_bytes() as i64,
            )
        };
        (0..5).map(|_| beyond()).collect::<Vec<_>>()
    });
    for ranks in found.unwrap_or_else(|error| panic!("{mesh}: {error}")) {
        // Keys and values of 64 tokens a frame, 64 features, in 2 layers, shared out evenly.
        let frame = 2 * 2 * 64 * 64 * 4 / mesh.ranks();
        let bytes: Vec<usize> = ranks.iter().map(|(bytes, _)| bytes / frame).collect();
        assert_eq!(bytes, [2, 4, 6, 6, 6], "{mesh}");
        let [first, .., last] = &ranks[..] else {
            unreachable!("5 blocks")
        };
        assert!((last.1 - first.1).abs() < frame as i64 / 2, "{mesh}: {ranks:?}");
    }
}

/// One test for all, as the allocator's account of a rank belongs to the process.
#[test]
fn memory_falls_with_the_ranks() {
    of_shared_frames(Work::Encode);
    of_shared_frames(Work::Decode);
    of_shared_frames(Work::Train);
    of_slices();
    for mesh in [MeshShape::default(), MeshShape::ulysses(2), MeshShape::ring(2)] {
        of_caches(mesh);
    }
}
