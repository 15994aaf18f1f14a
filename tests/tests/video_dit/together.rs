//! Learning, and then sampling with what was learnt: rounding leads many ranks no further from one than the error allowed.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::layout::{Axis, MeshShape, Placement};
use burn_sp::train::{ParamLayouts, clip_by_global_norm, sum_gradients};
use burn_sp::{SpDevice, launch_module};
use burn_sp_models::video_dit::{
    Forcing, FrameBlocks, VideoBatch, VideoDit, VideoGrid, VideoKey, VideoObjective, VideoOptions, VideoSamplerConfig,
};

use super::tiny;
use crate::common::{config, f64s, largest, mesh, noise, token_meshes};

/// 5 frames: not a multiple of 2 or 4 ranks, nor of a block of 2.
const GRID: VideoGrid = VideoGrid {
    frames: 5,
    rows: 1,
    columns: 3,
};

/// Clips, of which a step sees so many, and the next step the others.
const CLIPS: usize = 2 * BATCH;
const BATCH: usize = 2;

const STEPS: usize = 20;

/// Of a loss; 1e-4 was asked for, and 5e-7 is found.
const LOSS: f64 = 1e-5;

/// Of the largest value of the samples; 1e-3 was asked for, and 2e-6 is found.
const SAMPLE: f64 = 1e-4;

/// What is learnt, and how samples follow.
struct Mode {
    name: &'static str,
    objective: VideoObjective,
    /// One for the clip, or one for each block.
    prompts: usize,
    guidance: f64,
}

fn modes() -> Vec<Mode> {
    let teacher = || VideoObjective::new(FrameBlocks::new(2));
    let diffusion = || teacher().with_forcing(Forcing::Diffusion);
    let plain = |name, objective| Mode {
        name,
        objective,
        prompts: 1,
        guidance: 1.0,
    };
    let prompts = |name, objective| Mode {
        prompts: 3,
        ..plain(name, objective)
    };
    vec![
        plain("teacher forcing", teacher()),
        plain("diffusion forcing", diffusion()),
        plain("a window", diffusion().with_window(Some(3)).with_sink(1)),
        plain("from an image, teacher", teacher().with_image_to_video(true)),
        plain("from an image, diffusion", diffusion().with_image_to_video(true)),
        Mode {
            guidance: 2.0,
            ..plain("guidance", teacher().with_text_dropout(0.3))
        },
        prompts("prompts of blocks, teacher", teacher()),
        prompts("prompts of blocks, diffusion", diffusion()),
    ]
}

fn meshes() -> Vec<MeshShape> {
    let others = [mesh(2, 1, 2), MeshShape::tp(2)];
    token_meshes().into_iter().chain(others).collect()
}

/// What a rank brings home.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    losses: Vec<f64>,
    /// Every value of two videos.
    samples: Vec<f64>,
}

/// Fixed clips and texts, in f32, on a device.
struct Data {
    latents: Tensor<5>,
    texts: Tensor<4>,
}

impl Data {
    fn new(prompts: usize, device: &Device) -> Self {
        let on = (device, DType::F32);
        let texts = TensorData::new(noise(92, CLIPS * prompts * 20), [CLIPS, prompts, 4, 5]);
        Self {
            latents: Tensor::from_data(tiny::latents(91, CLIPS, &GRID, 1).convert_dtype(DType::F32), on),
            texts: Tensor::from_data(texts.convert_dtype(DType::F32), on),
        }
    }
}

impl Mode {
    /// Trains and samples on a mesh. Ranks find the same to the bit.
    fn on(&self, mesh: MeshShape) -> Found {
        let model = tiny::model(DType::F32).train();
        let body = |device: SpDevice, model: VideoDit| {
            let (model, layouts) = model.shard(&device);
            let (model, losses) = self.learn(model, &layouts, &device);
            let inner = SpDevice::new(device.device().clone().inner(), device.mesh().clone());
            Found {
                losses,
                samples: self.sample(&model.valid(), &inner),
            }
        };
        let ranks = launch_module(&config(mesh), &Device::flex().autodiff(), model, body);
        let mut ranks = ranks.unwrap_or_else(|error| panic!("{}, {mesh}: {error}", self.name));
        let first = ranks.swap_remove(0);
        assert!(ranks.iter().all(|rank| *rank == first), "{}, {mesh}", self.name);
        first
    }

    fn learn(&self, mut model: VideoDit, layouts: &ParamLayouts, device: &SpDevice) -> (VideoDit, Vec<f64>) {
        let data = Data::new(self.prompts, device.device());
        let partition = self.objective.partition(GRID, BATCH, device);
        let samples = partition.samples();
        let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let first = step * BATCH % CLIPS;
            let batch = VideoBatch {
                latents: partition.own(data.latents.clone().narrow(0, first, BATCH)),
                texts: data.texts.clone().narrow(0, first + samples.start, samples.len()),
                valid_frames: vec![],
            };
            let key = VideoKey {
                seed: 3,
                step: step as u64,
            };
            let sample = partition.sample(batch, key);
            let loss = sample.loss(&model, sample.count, &VideoOptions::default());
            losses.push(loss.value());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let grads = sum_gradients(&model, grads, layouts, device.mesh());
            let (grads, _) = clip_by_global_norm(&model, grads, Some(1.0), layouts, device.mesh());
            model = optimizer.step(0.01, model, grads);
        }
        (model, losses)
    }

    /// Two videos in three blocks, with the texts and, where it is given, the first frame of the first clips.
    fn sample(&self, model: &VideoDit, device: &SpDevice) -> Vec<f64> {
        let data = Data::new(self.prompts, device.device());
        let text = |block: usize| {
            let prompt = data.texts.clone().narrow(1, block.min(self.prompts - 1), 1);
            prompt.narrow(0, 0, BATCH).squeeze_dim::<3>(1)
        };
        let (objective, options) = (&self.objective, VideoOptions::default());
        let sampler = VideoSamplerConfig::new()
            .with_steps(4)
            .with_guidance(self.guidance)
            // The sink included.
            .with_window(objective.window.map(|window| window + objective.sink))
            .with_sink(objective.sink);
        let key = VideoKey { seed: 4, step: 0 };
        let mut sampler = sampler.init([GRID.rows, GRID.columns], BATCH, key, device);
        if objective.image_to_video {
            let first = data.latents.clone().narrow(0, 0, BATCH).narrow(2, 0, 1);
            sampler.give(model, first, text(0), &options);
        }
        let mut samples = Vec::new();
        for (block, frames) in [2, 2, 1].into_iter().enumerate() {
            let clean = sampler.next_block(model, frames, text(block), &options);
            let whole = clean.redistribute(Axis::Tp, Placement::Replicate).gather();
            samples.extend(f64s(&whole.into_local()));
        }
        samples
    }
}

/// The largest difference, in units of the largest of all values or of each.
fn worst(found: &[f64], expected: &[f64], unit: impl Fn(f64) -> f64) -> f64 {
    assert_eq!(found.len(), expected.len());
    let off = |(found, expected): (&f64, &f64)| (found - expected).abs() / unit(*expected);
    found.iter().zip(expected).map(off).fold(0.0, |most, off| {
        // Not `max`, which passes over what is no number.
        if off <= most { most } else { off }
    })
}

#[test]
fn learning_and_sampling_do_not_depend_on_the_mesh() {
    let (mut loss, mut sample) = (0f64, 0f64);
    for mode in modes() {
        let one = mode.on(MeshShape::default());
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let [first, last] = [&one.losses[..5], &one.losses[STEPS - 5..]].map(mean);
        let largest = largest(&one.samples);
        println!(
            "{}: losses from {first:.3} to {last:.3}, samples up to {largest:.3}",
            mode.name
        );
        assert!(last < first, "{}: {:?}", mode.name, one.losses);
        for mesh in meshes() {
            let found = mode.on(mesh);
            let losses = worst(&found.losses, &one.losses, f64::abs);
            let samples = worst(&found.samples, &one.samples, |_| largest);
            let what = format!("{}, {mesh}: losses {losses:.1e}, samples {samples:.1e}", mode.name);
            println!("{what}");
            assert!(losses <= LOSS && samples <= SAMPLE, "{what}");
            (loss, sample) = (loss.max(losses), sample.max(samples));
        }
    }
    println!("worst of all: losses {loss:.1e}, samples {sample:.1e}");
}
