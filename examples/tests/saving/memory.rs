//! Parameters are made whole one by one.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_sp::layout::MeshShape;
use burn_sp::train::{ParamLayouts, StateInfo, StateStore, shard_parameters};
use burn_sp::{LaunchConfig, SpDevice, launch};
use burn_sp_examples::memory::{enter, unranked_work_for};

use crate::{ALONE, folder};

const LAYERS: usize = 24;
const WIDTH: usize = 128;

/// Bytes of a parameter; biases are left out.
const PARAMETER: usize = 4 * WIDTH * WIDTH;

/// Bytes that are written at once.
const BUFFER: usize = 1 << 20;

#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Linear>,
}

#[test]
fn a_rank_holds_one_whole_parameter_at_a_time() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    unranked_work_for(None);
    let (folder, ranks) = (folder("memory"), 4);
    let mesh = MeshShape::default().with_dp(ranks);
    let beyond = launch(
        &LaunchConfig::new(mesh),
        &Device::flex().autodiff(),
        |device: SpDevice| {
            let account = enter(device.rank());
            let layer = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
            let model = || {
                let whole = device.seeded(1, |device| Layers {
                    layers: (0..LAYERS).map(|_| layer.init(device)).collect(),
                });
                shard_parameters(whole, &device, &ParamLayouts::replicated())
            };
            let (model, shards) = model();
            let whole = shards.gather(&model);
            let x = Tensor::<2>::ones([1, WIDTH], device.device());
            let y = whole.layers.iter().fold(x, |x, layer| layer.forward(x));
            let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
            drop(whole);
            let mut adamw = AdamWConfig::new().init();
            let model = adamw.step(0.1, model, gradients);

            let store = StateStore::new(&folder, &device).with_shards(&shards);
            let config = serde_json::Value::Null;
            let info = StateInfo {
                step: 1,
                seed: 1,
                config,
            };
            let held = account.live();
            account.reset_peak();
            store.save(&info, &model, &adamw).unwrap();
            let saving = account.peak() - held;
            let held = account.live();
            account.reset_peak();
            let loaded = store.load(model, AdamWConfig::new().init()).unwrap();
            let loading = account.peak() - held;
            drop(loaded);
            (saving, loading)
        },
    )
    .unwrap();
    // All of the state is 3 * LAYERS parameters; a rank's own is the rest of each.
    let own = LAYERS * PARAMETER / ranks;
    for (rank, (saving, loading)) in beyond.into_iter().enumerate() {
        // Gathered, copied from the device, and a moment as Burn hands it out. Rank 0 writes through a buffer.
        let buffer = if rank == 0 { BUFFER } else { 0 };
        assert!(
            saving <= 4 * PARAMETER + buffer,
            "rank {rank}: {saving} bytes more to save"
        );
        // Burn puts an optimizer together from a record's bytes: its own moments more than once.
        assert!(
            loading <= 5 * own + 4 * PARAMETER,
            "rank {rank}: {loading} bytes more to load"
        );
    }
}
