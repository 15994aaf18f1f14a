use burn::data::dataloader::batcher::Batcher;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_sp::layout::MeshShape;
use burn_sp::learner::TokenItem;
use burn_sp::seeded;
use burn_sp::train::valid_tokens;
use burn_sp_models::transformer::ForwardOptions;

use super::model::{Windows, llama, windows};
use super::run::{Run, whole};
use crate::common::{mesh, ranks};

fn meshes() -> [MeshShape; 6] {
    [
        mesh(1, 1, 2),
        mesh(1, 1, 4),
        mesh(1, 2, 1),
        mesh(2, 1, 2),
        MeshShape::tp(2),
        MeshShape::tp(2).with_dp(2),
    ]
}

/// Not Burn's loop: the steps as a program without it takes them.
#[test]
fn burn_takes_the_steps_that_it_is_said_to() {
    let run = Run::new("plain", None);
    whole(run.run());
    let losses = ranks(MeshShape::default(), |device| {
        let mut model = seeded(&Device::flex().autodiff(), 5, |device| llama().init(device));
        model = burn::module::Module::fork(model, device.device());
        let mut adamw = AdamWConfig::new().with_weight_decay(0.1).init();
        let mut losses = Vec::new();
        for (step, window) in windows(6, 11, 0).chunks(2).enumerate() {
            let batch: TokenItem = Windows.batch(window.to_vec(), device.device());
            let batch = batch.distribute(&device);
            let count = valid_tokens([&batch.labels]);
            let loss = model.loss(batch.tokens, &batch.labels, count, &ForwardOptions::default());
            losses.push(loss.value());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let lr = 0.02 - step as f64 * 0.018 / 12.0;
            model = adamw.step(lr, model, grads);
        }
        losses
    });
    let logged = run.logged("train", "Loss", 1).steps;
    assert_eq!(logged.len(), losses[0].len());
    for ((one, _), other) in logged.iter().zip(&losses[0]) {
        assert!((one - other).abs() <= 1e-5 * other, "{logged:?} {losses:?}");
    }
}

#[test]
fn every_mesh_has_the_losses_of_one_device() {
    let one = Run::new("losses", None);
    whole(one.run());
    assert_ne!(one.losses(1), one.losses(2));
    for mesh in meshes() {
        let run = Run::new("losses", mesh);
        whole(run.run());
        run.same_losses(&one);
    }
}

/// Odd lengths, and a last batch of fewer sequences than dp: of one.
#[test]
fn an_uneven_last_batch_counts_like_any() {
    let uneven = |mesh| Run {
        count: 7,
        length: 13,
        batch: 3,
        ..Run::new("uneven", mesh)
    };
    let one = uneven(None);
    whole(one.run());
    assert_eq!(one.logged("train", "Loss", 1).steps.len(), 3);
    for mesh in [mesh(2, 1, 2), mesh(3, 1, 1), mesh(1, 2, 2), MeshShape::tp(2).with_dp(2)] {
        let run = uneven(Some(mesh));
        whole(run.run());
        run.same_losses(&one);
    }
}

#[test]
fn gradients_accumulate_over_steps() {
    let accumulated = |mesh| Run {
        count: 5,
        batch: 1,
        accumulation: Some(2),
        clipping: Some(0.5),
        ..Run::new("accumulated", mesh)
    };
    let one = accumulated(None);
    whole(one.run());
    for mesh in [mesh(1, 1, 2), mesh(1, 2, 1), MeshShape::tp(2)] {
        let run = accumulated(Some(mesh));
        whole(run.run());
        run.same_losses(&one);
    }
}

#[test]
fn clipping_is_by_the_norm_of_all_parameters() {
    let clipped = |mesh, clipping| Run {
        clipping,
        ..Run::new(if clipping.is_some() { "clipped" } else { "unclipped" }, mesh)
    };
    let (one, free) = (clipped(None, Some(0.01)), clipped(None, None));
    whole(one.run());
    whole(free.run());
    assert_ne!(one.losses(2), free.losses(2));
    for mesh in [mesh(2, 1, 1), mesh(1, 1, 2), MeshShape::tp(2)] {
        let run = clipped(Some(mesh), Some(0.01));
        whole(run.run());
        run.same_losses(&one);
    }
}

/// One loader draws the order for all ranks, as it would for one device; also with workers.
#[test]
fn shuffled_data_come_in_one_order() {
    for workers in [0, 1] {
        let shuffled = |mesh| Run {
            shuffle: Some(3),
            workers,
            ..Run::new(&format!("shuffled-{workers}"), mesh)
        };
        let one = shuffled(None);
        whole(one.run());
        for mesh in [mesh(1, 1, 3), mesh(2, 2, 1)] {
            let run = shuffled(Some(mesh));
            whole(run.run());
            run.same_losses(&one);
        }
    }
}

/// Their order is that in which workers finish, but every rank gets the same, and each item once.
#[test]
fn several_workers_feed_all_ranks_alike() {
    let run = Run {
        shuffle: Some(3),
        workers: 3,
        batch: 1,
        ..Run::new("workers", mesh(2, 1, 2))
    };
    whole(run.run());
    let tokens: usize = run
        .logged("train", "Loss", 2)
        .steps
        .iter()
        .map(|(_, tokens)| tokens)
        .sum();
    assert_eq!(tokens, super::model::labels(&windows(6, 11, 0)));
}
