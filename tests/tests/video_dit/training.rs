//! Training batches: the same numbers on every mesh, and the losses and gradients of one rank.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::SpDevice;
use burn_sp::layout::MeshShape;
use burn_sp_models::video_dit::{
    FlowSchedule, Forcing, FrameBlocks, VideoBatch, VideoDit, VideoGrid, VideoKey, VideoObjective, VideoOptions,
    VideoSample, from_output_patches, input_patches, output_patches,
};
use burn_sp_tests::{Comparison, Outcome};

use super::tiny;
use crate::common::{TIMEOUT, f64s, mesh, noise, ranks, tensor, token_meshes};

/// 5 frames: not a multiple of 2 or 4 ranks, nor of a block of 2.
const GRID: VideoGrid = VideoGrid {
    frames: 5,
    rows: 1,
    columns: 3,
};

const BATCH: usize = 2;

const KEY: VideoKey = VideoKey { seed: 3, step: 11 };

fn objectives() -> Vec<VideoObjective> {
    let two = || VideoObjective::new(FrameBlocks::new(2));
    let diffusion = || two().with_forcing(Forcing::Diffusion);
    vec![
        two(),
        two().with_image_to_video(true),
        diffusion(),
        diffusion().with_image_to_video(true),
        diffusion().with_window(Some(3)).with_sink(1),
        // One block: the whole video at one noise level.
        VideoObjective::new(FrameBlocks::new(5)).with_forcing(Forcing::Diffusion),
        two().with_text_dropout(0.5),
    ]
}

fn meshes() -> Vec<MeshShape> {
    let others = [mesh(2, 2, 1), MeshShape::tp(2).with_ulysses(2)];
    token_meshes().into_iter().chain(others).collect()
}

fn latents() -> TensorData {
    tiny::latents(91, BATCH, &GRID, 1)
}

/// A prompt of 4 tokens for each of 3 blocks, or for the clip.
fn texts(prompts: usize) -> TensorData {
    TensorData::new(noise(92, BATCH * prompts * 20), [BATCH, prompts, 4, 5])
}

/// The second video is 3 frames long.
const VALID: [usize; 2] = [5, 3];

fn sample(objective: &VideoObjective, latents: Tensor<5>, texts: Tensor<4>, device: &SpDevice) -> VideoSample {
    let partition = objective.partition(GRID, BATCH, device);
    let samples = partition.samples();
    let batch = VideoBatch {
        latents: partition.own(latents),
        texts: texts.narrow(0, samples.start, samples.len()),
        valid_frames: VALID.to_vec(),
    };
    partition.sample(batch, KEY)
}

/// Patches, target, weights, texts and times of all ranks, to the bit.
fn gathered(objective: &VideoObjective, mesh: MeshShape) -> Vec<Vec<f64>> {
    let of = |device: SpDevice| {
        let on = device.device().clone();
        let latents = Tensor::<5>::from_data(latents().convert_dtype(DType::F32), (&on, DType::F32));
        let texts = Tensor::<4>::from_data(texts(1).convert_dtype(DType::F32), (&on, DType::F32));
        let VideoSample {
            input, target, weights, ..
        } = sample(objective, latents, texts, &device);
        let whole = [input.patches, target, weights, input.text].map(|tensor| f64s(&tensor.gather().into_local()));
        let mut all = whole.to_vec();
        all.push(input.times.iter::<f64>().collect());
        all
    };
    ranks(mesh, of).swap_remove(0)
}

/// Case 31, in every mode.
#[test]
fn all_meshes_train_on_the_same_numbers() {
    for objective in objectives() {
        let one = gathered(&objective, MeshShape::default());
        for mesh in meshes() {
            assert_eq!(gathered(&objective, mesh), one, "{objective:?}, {mesh}");
        }
    }
}

/// Of data-parallel replicas each draws its own.
#[test]
fn samples_differ() {
    let [patches, target, ..] = &gathered(&objectives()[2], MeshShape::default())[..] else {
        panic!("five tensors");
    };
    for tensor in [patches, target] {
        let (first, second) = tensor.split_at(tensor.len() / 2);
        let equal = first.iter().zip(second).filter(|(first, second)| first == second);
        // All but the padding's targets, which are there too.
        assert_eq!(equal.count(), 0);
    }
}

/// The numbers themselves, by their formulas.
#[test]
fn a_sample_is_what_its_objective_says() {
    let schedule = FlowSchedule::new(5.0);
    for objective in objectives() {
        let (blocks, copies) = (objective.blocks(), objective.mask().copies());
        ranks(MeshShape::default(), |device| {
            let on = Device::flex();
            let clean = Tensor::<5>::from_data(latents(), (&on, DType::F64));
            let texts = Tensor::<4>::from_data(texts(1), (&on, DType::F64));
            let found = sample(&objective, clean.clone(), texts.clone(), &device);
            let times: Vec<f64> = found.input.times.iter().collect();
            let weights = f64s(found.weights.local());
            let mut bearing = 0;
            for sample in 0..BATCH {
                for frame in 0..GRID.frames {
                    let given = objective.image_to_video && frame == 0;
                    let index = KEY.level(sample, blocks.block_of(frame), 1000);
                    let level = if given { 0.0 } else { schedule.level(index) };
                    let bears = !given && frame < VALID[sample];
                    bearing += usize::from(bears);
                    let weight = if bears { schedule.weight(index) } else { 0.0 };

                    let noise: Vec<f64> = KEY.noise(sample, frame, 3 * 2 * 6).into_iter().map(f64::from).collect();
                    let noise: Tensor<5> = tensor(&noise, [1, 3, 1, 2, 6], DType::F64, &on);
                    let clean = clean.clone().narrow(0, sample, 1).narrow(2, frame, 1);
                    let noisy = clean.clone() * (1.0 - level) + noise.clone() * level;
                    let velocity = noise - clean.clone();
                    for copy in 0..copies {
                        let noisy_half = copy + 1 == copies;
                        let at = copy * GRID.frames + frame;
                        let tokens = at * 3..at * 3 + 3;
                        let of = |tensor: &Tensor<3>| tensor.clone().narrow(0, sample, 1).slice_dim(1, tokens.clone());
                        let patches = input_patches(if noisy_half { noisy.clone() } else { clean.clone() }, 2);
                        let target = match noisy_half {
                            true => output_patches(velocity.clone(), 2),
                            false => output_patches(velocity.clone(), 2) * 0.0,
                        };
                        let what = format!("{objective:?}, sample {sample}, frame {frame}, copy {copy}");
                        assert_eq!(f64s(&of(found.input.patches.local())), f64s(&patches), "{what}");
                        assert_eq!(f64s(&of(found.target.local())), f64s(&target), "{what}");
                        let time = if noisy_half { 1000.0 * level } else { 0.0 };
                        assert_eq!(times[sample * copies * GRID.frames + at], time, "{what}");
                        let weight = if noisy_half { weight } else { 0.0 };
                        let row = sample * copies * GRID.tokens();
                        assert!(weights[row..][tokens].iter().all(|found| *found == weight), "{what}");
                    }
                }
                let text = f64s(&found.input.text.local().clone().narrow(0, sample, 1));
                let whole = f64s(&texts.clone().narrow(0, sample, 1));
                let dropped = KEY.drops_text(sample, objective.text_dropout);
                assert_eq!(text, if dropped { vec![0.0; 20] } else { whole });
            }
            assert_eq!(found.count, (bearing * 3 * 12) as u64);
        });
    }
}

/// A rank needs the frames of its tokens and no others; under teacher forcing it has the clean and the noisy tokens of the
/// same part of the video, and no rank has many more than another.
#[test]
fn ranks_need_their_own_frames_alone() {
    let grid = VideoGrid { frames: 9, ..GRID };
    for objective in objectives() {
        for mesh in meshes() {
            let copies = objective.mask().copies();
            let held = ranks(mesh, |device| {
                let partition = objective.partition(grid, BATCH, &device);
                let [samples, frames] = [partition.samples().len(), partition.frames().len()];
                let on = (device.device(), DType::F32);
                let batch = VideoBatch {
                    latents: Tensor::zeros([samples, 3, frames, 2, 6], on),
                    texts: Tensor::zeros([samples, 1, 4, 5], on),
                    valid_frames: vec![],
                };
                let tokens: Vec<usize> = partition.sample(batch, KEY).input.patches.positions(1).iter().collect();
                let mut touched: Vec<usize> = tokens.iter().map(|token| token / 3 % 9).collect();
                touched.sort();
                touched.dedup();
                assert_eq!(partition.frames(), touched);
                if copies == 2 {
                    let half = |noisy: usize| -> Vec<usize> {
                        let own = tokens.iter().filter(|token| **token / grid.tokens() == noisy);
                        own.map(|token| token % grid.tokens()).collect()
                    };
                    assert_eq!(half(0), half(1), "{mesh}");
                }
                tokens.len()
            });
            let (least, most) = (held.iter().min(), held.iter().max());
            let spread = most.expect("ranks") - least.expect("ranks");
            // One on each axis, in each half.
            assert!(spread <= 2 * copies, "{mesh}: {held:?}");
        }
    }
}

fn agrees(objective: &VideoObjective, prompts: usize, meshes: Vec<MeshShape>) {
    let comparison = Comparison::new(tiny::model(DType::F64))
        .shard_by(VideoDit::shard)
        .with_timeout(TIMEOUT)
        .with_factor(64.0)
        .input("latents", latents())
        .input("texts", texts(prompts))
        .on(meshes);
    let outcome = comparison.run(|rank, model| {
        let sample = sample(objective, rank.input("latents"), rank.input("texts"), rank.device());
        Outcome::new(sample.loss(model, sample.count, &VideoOptions::default()))
    });
    if let Err(difference) = outcome {
        panic!("{objective:?}, {prompts} prompts: {difference}");
    }
}

#[test]
fn losses_and_gradients_are_those_of_one_rank() {
    for objective in objectives() {
        agrees(&objective, 1, meshes());
    }
}

/// A prompt for each block, which its frames alone attend.
#[test]
fn prompts_of_blocks_agree_on_every_mesh() {
    for objective in objectives().into_iter().take(3) {
        agrees(&objective, 3, meshes());
    }
}

/// A block's velocity does not depend on another block's prompt where it does not see its frames, and does on its own.
#[test]
fn blocks_follow_their_own_prompts() {
    let objective = VideoObjective::new(FrameBlocks::new(2)).with_forcing(Forcing::Diffusion);
    let velocity = |changed: usize| {
        let run = |device: SpDevice| {
            let on = (device.device(), DType::F64);
            let all = Tensor::<4>::from_data(texts(3), on);
            let other = all.clone().narrow(1, changed, 1).zeros_like();
            let texts = all.slice_assign([0..BATCH, changed..changed + 1, 0..4, 0..5], other);
            let sample = sample(&objective, Tensor::from_data(latents(), on), texts, &device);
            let options = VideoOptions {
                mask: sample.mask,
                ..VideoOptions::default()
            };
            let model = tiny::model(DType::F64);
            let velocity = model.forward(&sample.input, &options).into_local();
            from_output_patches(velocity, &GRID, 2).into_data()
        };
        let data = ranks(MeshShape::default(), run).swap_remove(0);
        Tensor::<5>::from_data(data, (&Device::flex(), DType::F64))
    };
    let [first, last] = [velocity(0), velocity(2)];
    let same = |frames: std::ops::Range<usize>| {
        let of = |tensor: &Tensor<5>| f64s(&tensor.clone().slice_dim(2, frames.clone()));
        of(&first) == of(&last)
    };
    // The last block sees the first; the first does not see the last, whose prompt alone the other run changed.
    assert!(!same(0..2) && !same(4..5));
    let untouched = velocity(2);
    let all = velocity(1);
    let of = |tensor: &Tensor<5>| f64s(&tensor.clone().slice_dim(2, 0..2));
    assert_eq!(of(&untouched), of(&all));
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let objective = VideoObjective::new(FrameBlocks::new(2));
    let message = |latents: [usize; 5], texts: [usize; 4], valid: Vec<usize>| {
        let objective = objective.clone();
        crate::common::failure(MeshShape::default(), move |device| {
            let partition = objective.partition(GRID, BATCH, &device);
            let batch = VideoBatch {
                latents: Tensor::zeros(latents, device.device()),
                texts: Tensor::zeros(texts, device.device()),
                valid_frames: valid.clone(),
            };
            drop(partition.sample(batch, KEY));
        })
    };
    let (latents, texts) = ([2, 3, 5, 2, 6], [2, 1, 4, 5]);
    let found = message([2, 3, 4, 2, 6], texts, vec![]);
    assert!(
        found.contains("latents of 2 samples and 4 frames; give those of this rank"),
        "{found}"
    );
    let found = message([2, 3, 5, 2, 5], texts, vec![]);
    assert!(found.contains("not 1 x 3 square patches"), "{found}");
    let found = message(latents, [2, 2, 4, 5], vec![]);
    assert!(found.contains("give 1 or 3, one a block"), "{found}");
    let found = message(latents, texts, vec![5]);
    assert!(
        found.contains("the valid frames of 1 samples; give those of all 2"),
        "{found}"
    );
    let found = crate::common::failure(mesh(2, 1, 1), |device| {
        drop(VideoObjective::new(FrameBlocks::new(2)).partition(GRID, 1, &device));
    });
    assert!(found.contains("a batch of 1 on 2 data-parallel ranks"), "{found}");
    let problem = |objective: VideoObjective| objective.problem().expect("a problem");
    let wrong = VideoObjective::new(FrameBlocks::new(2)).with_window(Some(4));
    assert!(problem(wrong).contains("teacher forcing sees all clean frames"));
    let wrong = VideoObjective::new(FrameBlocks::new(0));
    assert!(problem(wrong).contains("a block has 0 frames"));
    let wrong = VideoObjective::new(FrameBlocks::new(1)).with_text_dropout(1.5);
    assert!(problem(wrong).contains("use 0 to 1"));
    let wrong = VideoObjective::new(FrameBlocks::new(1)).with_shift(0.0);
    assert!(problem(wrong).contains("a shift of 0"));
}
