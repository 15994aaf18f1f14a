//! The model of plain Burn and its sequence-parallel self: the same losses, and few lines between them.

use burn::tensor::Device;
use burn_sp::prelude::*;
use burn_sp_examples::add_sp::{after, batches, before};
use similar::{ChangeTag, TextDiff};

const BEFORE: &str = include_str!("../src/add_sp/before.rs");
const AFTER: &str = include_str!("../src/add_sp/after.rs");
const GUIDE: &str = include_str!("../../docs/src/add-to-your-model.md");

#[test]
fn fourteen_lines_are_changed() {
    let difference = TextDiff::from_lines(BEFORE, AFTER);
    let of = |tag| {
        difference
            .iter_all_changes()
            .filter(|change| change.tag() == tag)
            .count()
    };
    let (new, gone) = (of(ChangeTag::Insert), of(ChangeTag::Delete));
    assert!(new <= 14 && gone <= 14, "{new} lines are new, {gone} are gone");
}

/// The guide shows the difference of the files as they are.
#[test]
fn the_guide_shows_these_lines() {
    let difference = TextDiff::from_lines(BEFORE, AFTER);
    let shown = difference.unified_diff().context_radius(1).to_string();
    let block = format!("```diff\n{shown}```\n");
    assert!(GUIDE.contains(&block), "the guide should have this:\n{block}");
}

/// 61 tokens, which no mesh divides.
#[test]
fn losses_are_those_of_one_device() {
    let device = Device::flex().autodiff();
    let text = include_bytes!("../../README.md");
    let data = batches(text, &device);
    let model = burn_sp::seeded(&device, 7, |device| {
        before::ModelConfig::new(256, 64, 32, 4, 2).init(device)
    });
    let own = burn_sp::seeded(&device, 7, |device| {
        after::ModelConfig::new(256, 64, 32, 4, 2).init(device)
    });
    let losses = before::train(model, &data);
    assert!(losses[19] < 0.9 * losses[0], "{losses:?}");
    let meshes = [
        MeshShape::default(),
        MeshShape::ulysses(4),
        MeshShape::ring(3),
        MeshShape::ring(2).with_ulysses(2),
        MeshShape::ulysses(2).with_dp(2),
    ];
    for mesh in meshes {
        let ranks = LaunchConfig::new(mesh);
        let found = launch_module(&ranks, &device, own.clone(), |at, model| {
            after::train(model, &data, &at)
        })
        .unwrap();
        for (rank, found) in found.iter().enumerate() {
            for (step, (one, other)) in losses.iter().zip(found).enumerate() {
                assert!(
                    (one - other).abs() <= 1e-5 * one,
                    "{mesh}, rank {rank}, step {step}: {one} and {other}"
                );
            }
        }
    }
}
