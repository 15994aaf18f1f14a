//! The VAE's pieces by hand.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, activation::softmax};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::{SpDevice, SpTensor};
use burn_sp_models::vae::{
    AttentionBlock, AverageDown, CausalConv3dConfig, ChannelNorm, RepeatUp, Upsample, VaeConfig,
};

use crate::common::{contains, f64s, failure, noise, ranks, tensor};

fn clip(device: &SpDevice, values: &[f64], shape: [usize; 5]) -> SpTensor<5> {
    let whole = tensor(values, shape, DType::F64, device.device());
    device.distribute(
        whole,
        &Layout::replicated(shape).shard(2, Axis::Ulysses, Split::Contiguous),
    )
}

fn whole(x: SpTensor<5>) -> Vec<f64> {
    f64s(&x.gather().into_local())
}

fn constant<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    Param::from_tensor(tensor(values, shape, DType::F64, device))
}

/// Frame `f` has the value `f + 1`; the convolution in time makes decimal digits of what it reads, another number for each
/// of the two frames.
#[test]
fn upsampling_in_time_leaves_the_first_frame_alone() {
    for size in 1..=5 {
        let found = ranks(MeshShape::ulysses(size), |device| {
            let mut layer = Upsample::new([1, 1], true, device.device());
            let mut center = [0.0; 9];
            center[4] = 1.0;
            layer.resample.weight = constant(&center, [1, 1, 3, 3], device.device());
            layer.resample.bias = Some(constant(&[0.0], [1], device.device()));
            let conv = layer.time_conv.as_mut().expect("it has one");
            conv.weight = constant(&[100.0, 10.0, 1.0, 200.0, 20.0, 2.0], [2, 1, 3, 1, 1], device.device());
            conv.bias = constant(&[0.0, 0.0], [2], device.device());
            let values: Vec<f64> = (1..=5).map(f64::from).collect();
            whole(layer.forward(clip(&device, &values, [1, 1, 5, 1, 1])))
        });
        let frames = [1.0, 2.0, 4.0, 23.0, 46.0, 234.0, 468.0, 345.0, 690.0];
        let pixels: Vec<f64> = frames.into_iter().flat_map(|frame| [frame; 4]).collect();
        for (rank, found) in found.iter().enumerate() {
            assert_eq!(*found, pixels, "rank {rank} of {size}");
        }
    }
}

/// Channel `10 c` and pixel `f` (of one row and column): two frames become channels, whose neighbours are averaged.
#[test]
fn shortcuts_average_and_repeat() {
    for size in 1..=4 {
        let found = ranks(MeshShape::ulysses(size), |device| {
            let values: Vec<f64> = (0..2)
                .flat_map(|c| (0..5).map(move |f| f64::from(100 * (c + 1) + f)))
                .collect();
            let x = clip(&device, &values, [1, 2, 5, 1, 1]);
            let down = AverageDown {
                channels: 2,
                time: 2,
                space: 1,
            };
            let up = RepeatUp {
                channels: 1,
                time: 2,
                space: 1,
            };
            (whole(down.forward(x.clone())), whole(up.forward(x)))
        });
        // Of each channel the mean of frames 2u-1 and 2u, zeros before the clip.
        let down = [50.0, 101.5, 103.5, 100.0, 201.5, 203.5];
        // Channel 0 is the first of two frames, channel 1 the second.
        let up = [200.0, 101.0, 201.0, 102.0, 202.0, 103.0, 203.0, 104.0, 204.0];
        for (rank, found) in found.iter().enumerate() {
            assert_eq!(*found, (down.to_vec(), up.to_vec()), "rank {rank} of {size}");
        }
    }
    // In space: channels of four pixels, by row and column, and back.
    ranks(MeshShape::default(), |device| {
        let values: Vec<f64> = (0..16).map(f64::from).collect();
        let x = clip(&device, &values, [1, 1, 1, 4, 4]);
        let down = AverageDown {
            channels: 4,
            time: 1,
            space: 2,
        };
        let up = RepeatUp {
            channels: 1,
            time: 1,
            space: 2,
        };
        let y = down.forward(x);
        assert_eq!(
            f64s(y.local()),
            [
                0.0, 2.0, 8.0, 10.0, 1.0, 3.0, 9.0, 11.0, 4.0, 6.0, 12.0, 14.0, 5.0, 7.0, 13.0, 15.0
            ]
        );
        assert_eq!(f64s(up.forward(y).local()), values);
    });
}

#[test]
fn the_norm_divides_by_the_length() {
    let device = Device::flex().autodiff();
    let mut norm = ChannelNorm::<4>::new(2, &device);
    norm.gamma = constant(&[1.0, 2.0], [2, 1, 1, 1], &device);
    // Pixels (3, 4) and (0, 0).
    let x = tensor(&[3.0, 0.0, 4.0, 0.0], [1, 2, 1, 1, 2], DType::F64, &device).require_grad();
    let y = norm.forward(x.clone());
    let root = 2f64.sqrt();
    let expected = [0.6 * root, 0.0, 1.6 * root, 0.0];
    for (found, expected) in f64s(&y).into_iter().zip(expected) {
        assert!(
            (found - expected).abs() <= 4.0 * f64::EPSILON,
            "{found}, not {expected}"
        );
    }
    // Along (3, 4) a length changes nothing; at 0 the slope is that of the bound.
    let grads = y.sum().backward();
    let found = f64s(&x.grad(&grads).expect("of x"));
    let slope = |own: f64, other: f64, gamma: [f64; 2]| {
        root * (gamma[0] - own / 5.0 * (gamma[0] * own + gamma[1] * other) / 5.0) / 5.0
    };
    let expected = [
        slope(3.0, 4.0, [1.0, 2.0]),
        root * 1e12,
        slope(4.0, 3.0, [2.0, 1.0]),
        2.0 * root * 1e12,
    ];
    for (found, expected) in found.into_iter().zip(expected) {
        assert!(
            (found - expected).abs() <= 1e-14 * expected.abs().max(1.0),
            "{found}, not {expected}"
        );
    }
}

/// Against attention written out, a frame at a time.
#[test]
fn attention_is_within_a_frame() {
    let (channels, pixels) = (3, 4);
    let shape = [1, channels, 3, 2, 2];
    let found = ranks(MeshShape::ulysses(2), |device| {
        let mut block = AttentionBlock::new(channels, device.device());
        block.norm.gamma = constant(&noise(1, channels), [channels, 1, 1], device.device());
        block.to_qkv.weight = constant(&noise(2, 9 * 3), [9, 3, 1, 1], device.device());
        block.to_qkv.bias = Some(constant(&noise(3, 9), [9], device.device()));
        block.proj.weight = constant(&noise(4, 9), [3, 3, 1, 1], device.device());
        block.proj.bias = Some(constant(&noise(5, 3), [3], device.device()));
        let x = noise(6, 3 * 3 * 4);
        let found = whole(block.forward(clip(&device, &x, shape)));
        let x: Tensor<5> = tensor(&x, shape, DType::F64, device.device());
        let frames = (0..3).map(|frame| {
            // [pixels, channels]
            let x = x.clone().narrow(2, frame, 1).reshape([channels, pixels]).transpose();
            let length = x.clone().square().sum_dim(1).sqrt();
            let gamma = block.norm.gamma.val().reshape([1, channels]);
            let y = x.clone() / length * gamma.mul_scalar(3f64.sqrt());
            let qkv = y.matmul(block.to_qkv.weight.val().reshape([9, 3]).transpose())
                + block.to_qkv.bias.as_ref().expect("a bias").val().unsqueeze();
            let [q, k, v] = [0, 3, 6].map(|from| qkv.clone().narrow(1, from, 3));
            let out = softmax(q.matmul(k.transpose()).div_scalar(3f64.sqrt()), 1).matmul(v);
            let out = out.matmul(block.proj.weight.val().reshape([3, 3]).transpose())
                + block.proj.bias.as_ref().expect("a bias").val().unsqueeze();
            (x + out).transpose().reshape([1, channels, 1, 2, 2])
        });
        (found, f64s(&Tensor::<5>::cat(frames.collect(), 2)))
    });
    for (found, expected) in found {
        for (found, expected) in found.into_iter().zip(expected) {
            assert!(
                (found - expected).abs() <= 64.0 * f64::EPSILON,
                "{found}, not {expected}"
            );
        }
    }
}

/// Initial values are bounded as Burn's and PyTorch's are, and cannot all be equal.
#[test]
fn a_convolution_starts_small() {
    let conv = CausalConv3dConfig::new([4, 8], [3, 3, 3]).init(&Device::flex());
    let bound = 1.0 / (4.0f64 * 27.0).sqrt();
    for values in [f64s(&conv.weight.val()), f64s(&conv.bias.val())] {
        assert!(values.iter().all(|value| value.abs() <= bound * 1.000_001));
        assert!(values.iter().any(|value| value.abs() > bound / 2.0));
    }
}

#[test]
fn presets_have_wans_strides() {
    for (config, strides) in [(VaeConfig::wan21(), (4, 8)), (VaeConfig::wan22(), (4, 16))] {
        assert_eq!((config.temporal_stride(), config.spatial_stride()), strides);
        assert_eq!(config.problem(), None);
    }
}

/// A model has as many parameters as a polynomial of degree 2 in its channels says, which small models tell.
#[test]
fn presets_have_the_parameters_of_the_checkpoints() {
    let count = |preset: VaeConfig| {
        let at = |channels: usize| {
            let config = VaeConfig {
                base_channels: channels,
                decoder_channels: channels,
                ..preset.clone()
            };
            let vae = config.init(&Device::flex());
            [vae.encoder.num_params(), vae.decoder.num_params(), vae.num_params()].map(|count| count as i64)
        };
        let [few, more, most] = [2, 4, 6].map(at);
        let extrapolated = |part: usize, channels: usize| {
            let steps = (channels as i64 - 2) / 2;
            let curve = most[part] - 2 * more[part] + few[part];
            few[part] + steps * (more[part] - few[part]) + steps * (steps - 1) / 2 * curve
        };
        let rest = few[2] - few[0] - few[1];
        extrapolated(0, preset.base_channels) + extrapolated(1, preset.decoder_channels) + rest
    };
    assert_eq!(count(VaeConfig::wan21()), 126_892_531);
    assert_eq!(count(VaeConfig::wan22()), 704_688_668);
}

#[test]
fn what_cannot_be_is_refused() {
    let problem = |change: fn(&mut VaeConfig)| {
        let mut config = VaeConfig::wan22();
        change(&mut config);
        config.problem().expect("a problem")
    };
    contains(
        &problem(|config| config.multipliers = vec![1, 2]),
        &["2 multipliers", "3 steps"],
    );
    contains(&problem(|config| config.latent_channels = 47), &["48", "47"]);
    contains(&problem(|config| config.base_channels = 0), &["base_channels is 0"]);
    contains(
        &problem(|config| config.multipliers = vec![3, 2, 4, 4]),
        &["stage", "channels"],
    );
    let frames = failure(MeshShape::default(), |device| {
        let vae = super::models::tiny(false).init(device.device());
        vae.encode(SpTensor::replicated(
            Tensor::zeros([1, 3, 4, 8, 8], device.device()),
            &device,
        ));
    });
    contains(&frames, &["4 frames", "1 + 4 n", "say 1"]);
    let pixels = failure(MeshShape::default(), |device| {
        let vae = super::models::tiny(false).init(device.device());
        vae.encode(SpTensor::replicated(
            Tensor::zeros([1, 3, 5, 8, 12], device.device()),
            &device,
        ));
    });
    contains(&pixels, &["8 x 12", "multiples of 8"]);
}
