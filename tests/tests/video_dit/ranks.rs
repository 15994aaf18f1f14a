//! Many ranks are one: output, loss and the gradient of every parameter and input.

use burn::tensor::DType;
use burn_sp::attention::KvMove;
use burn_sp::layout::{Axis, MeshShape, Split};
use burn_sp::train::LossShare;
use burn_sp_models::transformer::{MemoryOptions, Recompute};
use burn_sp_models::video_dit::{
    FrameBlocks, VideoDit, VideoGrid, VideoInput, VideoMask, VideoOptions, output_patches,
};
use burn_sp_tests::{Comparison, Outcome};

use super::tiny;
use crate::common::{TIMEOUT, mesh, token_meshes};

/// Frames do not divide by 2 or 4, nor do 18 tokens by 4.
const GRID: VideoGrid = VideoGrid {
    frames: 3,
    rows: 2,
    columns: 3,
};

/// In f64, where sums in another order differ by a few roundings of the largest element, and any fault by more.
const ROUNDINGS: f64 = 32.0;

fn masks() -> Vec<VideoMask> {
    let (two, image) = (FrameBlocks::new(2), FrameBlocks::new(2).with_image_first());
    vec![
        VideoMask::Full,
        VideoMask::block_causal(two),
        VideoMask::block_causal(image),
        VideoMask::local(FrameBlocks::new(1), 1, 1),
        VideoMask::teacher_forcing(FrameBlocks::new(1)),
        VideoMask::teacher_forcing(image),
    ]
}

fn meshes() -> Vec<MeshShape> {
    let others = [
        mesh(2, 2, 1),
        MeshShape::tp(2),
        // More ranks than heads.
        MeshShape::tp(4),
        MeshShape::tp(2).with_ulysses(2),
        MeshShape::tp(2).with_ring(2),
    ];
    token_meshes().into_iter().chain(others).collect()
}

struct Case {
    grid: VideoGrid,
    mask: VideoMask,
    kv: KvMove,
    split: Split,
    memory: MemoryOptions,
}

impl Case {
    fn new(mask: VideoMask) -> Self {
        Self {
            grid: GRID,
            mask,
            kv: KvMove::Ring,
            split: Split::Zigzag,
            memory: MemoryOptions::default(),
        }
    }

    fn agrees(&self, dtype: DType, factor: f64, meshes: Vec<MeshShape>) {
        const BATCH: usize = 2;
        let (grid, copies) = (self.grid, self.mask.copies());
        let comparison = Comparison::new(tiny::model(dtype))
            .with_factor(factor)
            .shard_by(VideoDit::shard)
            .with_timeout(TIMEOUT)
            .input("latents", tiny::latents(71, BATCH, &grid, copies))
            .input("target", tiny::latents(73, BATCH, &grid, copies))
            .input("text", tiny::text(BATCH))
            .on(meshes);
        let outcome = comparison.run(|rank, model| {
            let device = match rank.device().mesh().size(Axis::Ring) {
                // What it is compared with; parts for several ranks would not fit.
                1 => rank.device().clone(),
                _ => rank.device().clone().with_ring_split(self.split.clone()),
            };
            let times = tiny::times(BATCH, &grid, copies);
            let input = VideoInput::partition(grid, rank.input("latents"), times, rank.input("text"), &device);
            let options = VideoOptions {
                mask: self.mask,
                kv: self.kv,
                memory: self.memory.clone(),
            };
            let velocity = model.forward(&input, &options);
            let target = output_patches(rank.input::<5>("target"), 2);
            let layout = device.sequence_layout(target.dims());
            let target = device.distribute(target, &layout).shard(Axis::Tp, 1, Split::Contiguous);
            let off = velocity.clone().sub(target);
            let loss = LossShare::mean(off.clone().mul(off));
            Outcome::new(loss).output("velocity", &velocity)
        });
        if let Err(difference) = outcome {
            panic!(
                "{:?} of {grid:?}, {}, {:?}, {:?}: {difference}",
                self.mask, self.split, self.kv, self.memory
            );
        }
    }
}

#[test]
fn every_mask_agrees_on_every_mesh() {
    for mask in masks() {
        for kv in [KvMove::Ring, KvMove::Gather] {
            for split in [Split::Contiguous, Split::Zigzag] {
                let case = Case {
                    kv,
                    split,
                    ..Case::new(mask)
                };
                let meshes = meshes().into_iter();
                // Where there is no ring, one way to move keys and one split is as good as another.
                let first = kv == KvMove::Ring && case.split == Split::Zigzag;
                let meshes = meshes.filter(|mesh| first || mesh.ring > 1).collect();
                case.agrees(DType::F64, ROUNDINGS, meshes);
            }
        }
    }
}

/// Both halves of a frame on one rank.
#[test]
fn balanced_teacher_forcing_agrees() {
    let mask = VideoMask::teacher_forcing(FrameBlocks::new(1));
    for ring in [2, 4] {
        let split = Split::balanced(&mask.over(&GRID), 2 * GRID.tokens(), ring);
        let case = Case {
            split,
            ..Case::new(mask)
        };
        case.agrees(DType::F64, ROUNDINGS, vec![mesh(1, ring, 1)]);
    }
}

/// No layout loses more digits than one rank does.
#[test]
fn narrow_models_lose_no_more_on_many_ranks() {
    for mask in [VideoMask::Full, VideoMask::block_causal(FrameBlocks::new(2))] {
        for dtype in [DType::F32, DType::BF16] {
            Case::new(mask).agrees(dtype, Comparison::<VideoDit>::FACTOR, meshes());
        }
    }
}

/// Case 21: two tokens on four ranks, of which some have none.
#[test]
fn fewer_tokens_than_ranks_agree() {
    let grid = VideoGrid {
        frames: 2,
        rows: 1,
        columns: 1,
    };
    let case = Case {
        grid,
        ..Case::new(VideoMask::block_causal(FrameBlocks::new(1)))
    };
    case.agrees(DType::F64, ROUNDINGS, meshes());
}

#[test]
fn what_is_computed_again_agrees() {
    let modes = [
        (Recompute::None, 3),
        (Recompute::Blocks, 1),
        (Recompute::Blocks, 2),
        (Recompute::Attention, 1),
        (Recompute::AllButAttention, 5),
    ];
    for (recompute, mlp_tiles) in modes {
        let memory = MemoryOptions {
            recompute,
            mlp_tiles,
            ..MemoryOptions::default()
        };
        let case = Case {
            memory,
            ..Case::new(VideoMask::block_causal(FrameBlocks::new(2)))
        };
        let meshes = vec![
            mesh(1, 1, 1),
            mesh(1, 1, 4),
            mesh(1, 2, 2),
            MeshShape::tp(2).with_ulysses(2),
        ];
        case.agrees(DType::F64, ROUNDINGS, meshes);
    }
}
