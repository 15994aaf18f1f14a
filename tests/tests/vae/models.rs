//! Tiny random VAEs: clips split over ranks against one rank, forward and every gradient.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::LossShare;
use burn_sp::{SpDevice, SpTensor, seeded};
use burn_sp_models::vae::{Vae, VaeConfig};
use burn_sp_tests::{Comparison, Outcome, Rank, cast};

use super::rounding::SPREAD;
use crate::common::{TIMEOUT, f64s, noise, ranks, tensor};

/// Wan 2.1's or 2.2's shape with few channels: 4, as norms over 2 make much of a rounding where both are near 0.
pub fn tiny(shortcuts: bool) -> VaeConfig {
    let preset = if shortcuts {
        VaeConfig::wan22()
    } else {
        VaeConfig::wan21()
    };
    VaeConfig {
        base_channels: 4,
        decoder_channels: 4,
        latent_channels: 2,
        latent_mean: vec![0.25, -0.5],
        latent_std: vec![2.0, 0.5],
        ..preset
    }
}

pub fn model(config: &VaeConfig, seed: u64, dtype: DType) -> Vae {
    cast(seeded(&Device::flex(), seed, |device| config.init(device)), dtype)
}

/// Two clips of `latents` latents, each latent of one pixel.
pub fn pixels(size: usize, latents: usize) -> (Vec<f64>, [usize; 5]) {
    let shape = [2, 3, 1 + 4 * (latents - 1), size, size];
    (noise(11, shape.iter().product()), shape)
}

fn by_frames(device: &SpDevice, whole: Tensor<5>, split: Split) -> SpTensor<5> {
    let layout = Layout::replicated(whole.dims())
        .shard(0, Axis::Dp, Split::Contiguous)
        .shard(2, Axis::Ulysses, split);
    device.distribute(whole, &layout)
}

pub fn outcome(rank: &Rank, vae: &Vae, even: bool) -> Outcome {
    let clip = rank.input::<5>("clip");
    let ranks = rank.device().mesh().size(Axis::Ulysses);
    let latents = 1 + (clip.dims()[2] - 1) / 4;
    let split = if even {
        Split::Contiguous
    } else {
        vae.frame_split(latents, ranks)
    };
    let clip = by_frames(rank.device(), clip, split.clone());
    let latents = vae.encode(clip.clone());
    let again = vae.decode(latents.clone());
    if !even {
        // Latents are contiguous, and pixels come back to where they came from.
        assert!(
            latents.layout().shards(2) == [(Axis::Ulysses, Split::Contiguous)],
            "{}",
            latents.layout()
        );
        assert_eq!(again.layout(), clip.layout());
    }
    let loss =
        LossShare::mean(again.clone().mul(again.clone())).add(LossShare::mean(latents.clone().mul(latents.clone())));
    Outcome::new(loss).output("latents", &latents).output("clip", &again)
}

/// The harness in a dtype, with another factor than its own.
pub fn comparison(vae: Vae, latents: usize, meshes: &[MeshShape], factor: f64) -> Comparison<Vae> {
    let (values, shape) = pixels(vae.spatial_stride, latents);
    Comparison::new(vae)
        .input("clip", TensorData::new(values, shape))
        .on(meshes)
        .with_timeout(TIMEOUT)
        .with_factor(factor)
}

/// In f32, within [`SPREAD`] times one rank's error. What one rank is off in f64 nobody knows: there a quantity may be off
/// by as many roundings of f64 as by roundings of f32 in f32.
fn compare(config: &VaeConfig, latents: usize, meshes: &[MeshShape], even: bool) {
    let run = |dtype, factor| {
        let comparison = comparison(model(config, 7, dtype), latents, meshes, factor);
        let report = comparison.run(|rank, vae| outcome(rank, vae, even));
        report.unwrap_or_else(|difference| panic!("{latents} latents in {dtype:?}: {difference}"))
    };
    let single = run(DType::F32, SPREAD);
    // Judged below.
    let double = run(DType::F64, 1e9);
    let scale = f64::EPSILON / f64::from(f32::EPSILON);
    for ((mesh, single), (_, double)) in single.meshes.iter().zip(&double.meshes) {
        assert_eq!(single.len(), double.len());
        for (single, double) in single.iter().zip(double) {
            assert_eq!(single.quantity, double.quantity);
            let (error, allowed) = (double.error, scale * single.allowed);
            let quantity = &double.quantity;
            assert!(
                error <= allowed,
                "{latents} latents in f64 on {mesh}: {quantity} is off by {error:e}; {allowed:e} are allowed"
            );
        }
    }
}

fn split_over(ranks: &[usize]) -> Vec<MeshShape> {
    ranks.iter().copied().map(MeshShape::ulysses).collect()
}

#[test]
fn ranks_encode_and_decode_as_one_does() {
    compare(&tiny(false), 5, &split_over(&[2, 3, 4]), false);
    compare(&tiny(true), 4, &split_over(&[2, 3]), false);
}

#[test]
fn clips_may_be_shared_out_too() {
    compare(&tiny(true), 3, &[MeshShape::ulysses(2).with_dp(2)], false);
}

/// Frames cut anywhere: a rank's frames may end in no latent.
#[test]
fn frames_may_be_cut_anywhere() {
    compare(&tiny(false), 3, &split_over(&[2, 3, 4]), true);
}

/// One frame on the first rank, and one rank has none.
#[test]
fn ranks_may_have_fewer_frames_than_the_halo_or_none() {
    compare(&tiny(false), 3, &split_over(&[4]), false);
    compare(&tiny(true), 2, &split_over(&[3]), false);
}

/// What a frame becomes does not depend on later ones, encoded or decoded.
#[test]
fn no_frame_sees_a_later_one() {
    for shortcuts in [false, true] {
        ranks(MeshShape::default(), |device| {
            let config = tiny(shortcuts);
            let vae = cast(seeded(device.device(), 7, |device| config.init(device)), DType::F64);
            let (values, shape) = pixels(vae.spatial_stride, 3);
            let clip = tensor(&values, shape, DType::F64, device.device());
            let encode = |clip: Tensor<5>| vae.encode(SpTensor::replicated(clip, &device)).into_local();
            let decode = |latents: Tensor<5>| vae.decode(SpTensor::replicated(latents, &device)).into_local();
            let latents = encode(clip.clone());
            // Of the means, with the mean and standard deviation of the data.
            let moments = vae.moments(SpTensor::replicated(clip.clone(), &device)).into_local();
            let data = |values| tensor::<5>(values, [1, 2, 1, 1, 1], DType::F64, device.device());
            let means = latents.clone() * data(&config.latent_std) + data(&config.latent_mean);
            near(&means, &moments.narrow(1, 0, 2));
            let again = decode(latents.clone());
            assert_eq!(again.dims(), shape);
            for count in 1..=2 {
                let frames = vae.frames_of(0..count).end;
                let early = encode(clip.clone().narrow(2, 0, frames));
                near(&early, &latents.clone().narrow(2, 0, count));
                near(&decode(early), &again.clone().narrow(2, 0, frames));
            }
        });
    }
}

pub fn near(found: &Tensor<5>, expected: &Tensor<5>) {
    assert_eq!(found.dims(), expected.dims());
    let peak = f64s(expected).into_iter().fold(0.0f64, |peak, x| peak.max(x.abs()));
    for (found, expected) in f64s(found).into_iter().zip(f64s(expected)) {
        assert!(
            (found - expected).abs() <= 1000.0 * f64::EPSILON * peak,
            "{found}, not {expected}"
        );
    }
}
