//! Parameters shared out over ranks, under every way to compute again: the same step.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_sp::layout::MeshShape;
use burn_sp::train::{LossShare, shard_parameters, sum_gradients};
use burn_sp::{SpDevice, launch_module};
use burn_sp_models::transformer::{MemoryOptions, Recompute};
use burn_sp_models::video_dit::{VideoDit, VideoGrid, VideoInput, VideoOptions};
use burn_sp_tests::{Values, parameters_by_path};

use super::tiny;
use crate::common::{config, mesh};

const GRID: VideoGrid = VideoGrid {
    frames: 3,
    rows: 1,
    columns: 2,
};

/// Every parameter, whole, after a step down its gradient.
fn step(device: SpDevice, model: VideoDit, shared: Option<Recompute>) -> BTreeMap<String, Values> {
    let (mut model, mut layouts) = model.shard(&device);
    let mut memory = MemoryOptions::default();
    if let Some(recompute) = shared {
        let shards;
        (model, shards) = shard_parameters(model, &device, &layouts);
        layouts = shards.layouts().clone();
        (memory.recompute, memory.shards) = (recompute, shards);
    }
    let whole = |data: burn::tensor::TensorData| (data, (device.device(), DType::F64));
    let (latents, options) = whole(tiny::latents(71, 1, &GRID, 1));
    let latents = Tensor::from_data(latents, options);
    let (text, options) = whole(tiny::text(1));
    let text = Tensor::from_data(text, options);
    let input = VideoInput::partition(GRID, latents, tiny::times(1, &GRID, 1), text, &device);
    let options = VideoOptions {
        memory: memory.clone(),
        ..VideoOptions::default()
    };
    let velocity = model.forward(&input, &options);
    let loss = LossShare::mean(velocity.clone().mul(velocity));
    let mut grads = loss.backward();
    let own = GradientsParams::from_module(&mut grads, &model);
    let grads = sum_gradients(&model, own, &layouts, device.mesh());
    let model = memory.shards.gather(&SgdConfig::new().init().step(1.0, model, grads));
    parameters_by_path(&model)
}

#[test]
fn a_step_of_shared_out_parameters_is_that_of_whole_ones() {
    let run = |shape: MeshShape, shared| {
        let model = tiny::model(DType::F64).train();
        let body = |device, model| step(device, model, shared);
        let found = launch_module(&config(shape), &Device::flex().autodiff(), model, body);
        found.unwrap_or_else(|error| panic!("{shape}, {shared:?}: {error}"))
    };
    let modes = [
        Recompute::None,
        Recompute::Blocks,
        Recompute::Attention,
        Recompute::AllButAttention,
    ];
    for shape in [
        mesh(1, 1, 2),
        mesh(1, 3, 1),
        mesh(1, 2, 2),
        MeshShape::tp(2).with_ulysses(2),
    ] {
        let expected = run(shape, None);
        for recompute in modes {
            let found = run(shape, Some(recompute));
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(found.keys().eq(expected.keys()), "{shape}, {recompute:?}");
                for (path, expected) in expected {
                    let context = format!("{shape}, {recompute:?}, rank {rank}: {path}");
                    assert_eq!(found[path].shape, expected.shape, "{context}");
                    let pairs = found[path].elements.iter().zip(&expected.elements);
                    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(worst <= 1e-14 * expected.peak(), "{context} is off by {worst:e}");
                }
            }
        }
    }
}
