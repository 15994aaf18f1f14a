//! Encoding slices of raw frames without any exchange.

use burn::tensor::{DType, Tensor};
use burn_sp::layout::MeshShape;
use burn_sp::{SpTensor, seeded};
use burn_sp_models::vae::{EncodeSlice, VaeConfig};
use burn_sp_tests::cast;

use super::models::{near, tiny};
use crate::common::{contains, f64s, noise, ranks, tensor};

/// The numbers of the published encoders; how many channels there are does not matter.
#[test]
fn latents_of_wan_depend_on_112_frames_before_their_own() {
    for shortcuts in [false, true] {
        let vae = tiny(shortcuts).init(&burn::tensor::Device::flex());
        assert_eq!((vae.receptive_field(), vae.least_halo()), (112, 27));
    }
}

#[test]
fn slices_of_96_latents_on_4_ranks() {
    let vae = tiny(true).init(&burn::tensor::Device::flex());
    let slice = |rank: usize| vae.slice(24 * rank..24 * (rank + 1), 28).expect("a wide halo");
    let slices: Vec<EncodeSlice> = (0..4).map(slice).collect();
    let frames: Vec<_> = slices.iter().map(|slice| slice.frames.clone()).collect();
    assert_eq!(frames, [0..93, 0..189, 76..285, 172..381]);
    let numbers = |number: fn(&EncodeSlice) -> usize| slices.iter().map(number).collect::<Vec<_>>();
    assert_eq!(numbers(|slice| slice.drop), [0, 24, 29, 29]);
    assert_eq!(numbers(EncodeSlice::encoded), [24, 48, 53, 53]);
}

#[test]
fn too_small_a_halo_is_refused() {
    let vae = tiny(true).init(&burn::tensor::Device::flex());
    let error = vae
        .slice(48..72, 26)
        .expect_err("a latent reads 27 before its own")
        .to_string();
    contains(&error, &["a halo of 26 latents", "112 frames", "make it 27"]);
    assert!(vae.slice(48..72, 27).is_ok());
    // Whatever the halo, if all that there is before lies in it.
    assert!(vae.slice(3..9, 3).is_ok());
    assert!(vae.slice(0..9, 0).is_ok());
    assert_eq!(vae.slice(5..5, 0).expect("nothing").encoded(), 0);
}

/// A slice gives the latents of the whole clip with the least halo, and others with one latent less.
#[test]
fn slices_give_the_latents_of_the_whole() {
    ranks(MeshShape::default(), |device| {
        let config = VaeConfig {
            multipliers: vec![1, 2],
            temporal: vec![true],
            res_blocks: 1,
            ..tiny(false)
        };
        let vae = cast(seeded(device.device(), 3, |device| config.init(device)), DType::F64);
        let (latents, halo) = (28, vae.least_halo());
        // 2 of the first convolution and 4 of a block; then 2 in time, every other; 4 of a block, 8 in the middle, 2.
        assert_eq!((vae.receptive_field(), halo), (8 + 2 * 14, 17));
        let shape = [1, 3, 1 + 2 * (latents - 1), 4, 4];
        let clip: Tensor<5> = tensor(&noise(5, shape.iter().product()), shape, DType::F64, device.device());
        let whole = vae.encode(SpTensor::replicated(clip.clone(), &device)).into_local();
        let encode = |slice: &EncodeSlice| {
            let frames = clip.clone().narrow(2, slice.frames.start, slice.frames.len());
            vae.encode_slice(frames, slice, &device)
        };
        for keep in [0..4, 4..19, 17..20, 18..20, 19..28, 27..28] {
            let slice = vae.slice(keep.clone(), halo).expect("a halo that will do");
            near(&encode(&slice), &whole.clone().narrow(2, keep.start, keep.len()));
        }
        let slice = vae.slice(24..26, halo).expect("a halo that will do");
        let short = EncodeSlice {
            frames: slice.frames.start + 2..slice.frames.end,
            drop: slice.drop - 1,
            ..slice.clone()
        };
        let expected = f64s(&whole.clone().narrow(2, 24, 2));
        let off = f64s(&encode(&short))
            .into_iter()
            .zip(&expected)
            .map(|(found, expected)| (found - expected).abs());
        assert!(
            off.fold(0.0, f64::max) > 1e-9,
            "one frame before too few changes something"
        );
    });
}
