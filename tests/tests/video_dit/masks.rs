//! Who sees whom in a video, counted through sharded attention (oracle O1): equal scores average the one-hot values of
//! what is visible, so that a row is 1 over the count where it sees, and 0 elsewhere.

use burn::tensor::DType;
use burn_sp::attention::{AttentionOptions, KvMove, Positions, attention};
use burn_sp::layout::Split;
use burn_sp_models::video_dit::{FrameBlocks, VideoGrid, VideoMask};

use crate::common::{f64s, mesh, ranks, tensor};

const GRID: VideoGrid = VideoGrid {
    frames: 7,
    rows: 1,
    columns: 2,
};

/// The frames that a query of a frame sees, by the definition.
#[derive(Clone, Copy)]
struct Rule {
    mask: VideoMask,
    sees: fn(usize, usize) -> bool,
}

/// Blocks of 3 frames: 0..3, 3..6 and the last.
fn block(frame: usize) -> usize {
    frame / 3
}

/// The first frame alone: 0, 1..4, 4..7.
fn image_block(frame: usize) -> usize {
    frame.div_ceil(3)
}

/// Of teacher forcing over twice 7 frames.
fn forced(query: usize, key: usize, block: fn(usize) -> usize) -> bool {
    let (noisy, own, other) = (query >= 7, block(query % 7), block(key % 7));
    match (noisy, key >= 7) {
        (false, clean) => !clean && other <= own,
        (true, false) => other < own,
        (true, true) => other == own,
    }
}

fn rules() -> Vec<Rule> {
    let (three, image) = (FrameBlocks::new(3), FrameBlocks::new(3).with_image_first());
    let rule = |mask: VideoMask, sees: fn(usize, usize) -> bool| Rule { mask, sees };
    vec![
        rule(VideoMask::Full, |_, _| true),
        rule(VideoMask::block_causal(three), |q, k| block(k) <= block(q)),
        rule(VideoMask::block_causal(image), |q, k| image_block(k) <= image_block(q)),
        // The block's end is 3, 6, 9.
        rule(VideoMask::local(three, 4, 0), |q, k| {
            block(k) <= block(q) && k + 4 >= 3 * (block(q) + 1)
        }),
        rule(VideoMask::local(three, 3, 1), |q, k| block(k) == block(q) || (k == 0)),
        // The block's end is 1, 4, 7.
        rule(VideoMask::local(image, 4, 2), |q, k| {
            let end = 1 + 3 * image_block(q);
            k < end && (k + 4 >= end || k < 2)
        }),
        rule(VideoMask::teacher_forcing(three), |q, k| forced(q, k, block)),
        rule(VideoMask::teacher_forcing(image), |q, k| forced(q, k, image_block)),
    ]
}

#[test]
fn every_mask_counts_right_on_every_mesh() {
    for Rule { mask, sees } in rules() {
        let tokens = mask.copies() * GRID.tokens();
        let frame = |position: usize| position / GRID.tokens_per_frame();
        for (shape, kv) in [
            (mesh(1, 1, 1), KvMove::Ring),
            (mesh(1, 1, 2), KvMove::Ring),
            (mesh(1, 1, 4), KvMove::Ring),
            (mesh(1, 2, 1), KvMove::Ring),
            (mesh(1, 4, 1), KvMove::Ring),
            (mesh(1, 4, 1), KvMove::Gather),
            (mesh(1, 2, 2), KvMove::Ring),
        ] {
            let balanced = Split::balanced(&mask.over(&GRID), tokens, shape.ring);
            for split in [Split::Contiguous, Split::Zigzag, balanced] {
                ranks(shape, |device| {
                    let device = device.with_ring_split(split.clone());
                    let whole = |values: &[f64], features: usize| {
                        let x = tensor(values, [1, tokens, 2, features], DType::F64, device.device());
                        let layout = device.sequence_layout(x.dims());
                        device.distribute(x, &layout)
                    };
                    let one_hot = |i: usize| f64::from(u8::from(i / tokens / 2 == i % tokens));
                    let one_hot: Vec<f64> = (0..tokens * 2 * tokens).map(one_hot).collect();
                    let zeros = vec![0.0; tokens * 2];
                    let options = AttentionOptions {
                        mask: mask.over(&GRID),
                        kv,
                        ..AttentionOptions::default()
                    };
                    let out = attention(whole(&zeros, 1), whole(&zeros, 1), whole(&one_hot, tokens), &options);
                    let rows = f64s(out.local());
                    for (row, position) in out.positions(1).iter().flat_map(|p| [p, p]).enumerate() {
                        let visible: Vec<usize> =
                            (0..tokens).filter(|key| sees(frame(position), frame(*key))).collect();
                        for key in 0..tokens {
                            let found = rows[row * tokens + key];
                            let count = if found > 0.0 { (1.0 / found).round() as usize } else { 0 };
                            let expected = if visible.contains(&key) { visible.len() } else { 0 };
                            assert_eq!(
                                count, expected,
                                "{mask:?} on {shape}, {split}: {key} seen from {position}"
                            );
                        }
                    }
                });
            }
        }
    }
}

/// Teacher forcing shows (nb + 1) / (4 nb) of all pairs, of nb blocks.
#[test]
fn the_visible_share_of_teacher_forcing() {
    for blocks in 1..=5 {
        let grid = VideoGrid {
            frames: 3 * blocks,
            rows: 2,
            columns: 3,
        };
        let all = Positions::whole(2 * grid.tokens());
        let visible = VideoMask::teacher_forcing(FrameBlocks::new(3))
            .over(&grid)
            .visible_pairs(&all, &all);
        let pairs = (2 * grid.tokens()).pow(2) as u64;
        assert_eq!(visible * 4 * blocks as u64, pairs * (blocks as u64 + 1));
    }
}

/// Twins: every rank owns the clean and the noisy tokens of the same positions, and the same number of either.
#[test]
fn balanced_teacher_forcing_gives_both_halves_to_a_rank() {
    let mask = VideoMask::teacher_forcing(FrameBlocks::new(3)).over(&GRID);
    let half = GRID.tokens();
    let parts = Split::balanced(&mask, 2 * half, 2).parts(2 * half, 2);
    for rank in 0..2 {
        let owned: Vec<usize> = parts.of(rank).iter().cloned().flatten().collect();
        let (clean, noisy) = owned.split_at(owned.len() / 2);
        let twins: Vec<usize> = clean.iter().map(|position| position + half).collect();
        assert_eq!(noisy, twins);
        assert_eq!(clean.len(), half / 2);
    }
}

#[test]
fn masks_that_cannot_work_are_refused() {
    let problem = |mask: VideoMask| mask.problem().expect("a problem");
    assert!(problem(VideoMask::block_causal(FrameBlocks::new(0))).contains("a block has 0 frames"));
    let short = VideoMask::local(FrameBlocks::new(3), 2, 1);
    assert!(problem(short).contains("a window of 2 frames is shorter than a block of 3"));
    assert_eq!(VideoMask::local(FrameBlocks::new(3), 3, 0).problem(), None);
    assert_eq!(VideoMask::Full.problem(), None);
}
