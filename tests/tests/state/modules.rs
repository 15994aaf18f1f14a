//! What modules may have beside trained floats, and optimizers beside AdamW.

use std::path::Path;

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdafactorConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_sp::SpDevice;
use burn_sp::layout::MeshShape;
use burn_sp::train::{StateInfo, StateStore, sum_gradients};

use crate::common::{mesh, ranks};
use crate::folder;

/// A trained float, a frozen one, one of 2 bytes, and others.
#[derive(Module, Debug)]
struct Mixed {
    linear: Linear,
    frozen: Linear,
    half: Param<Tensor<1>>,
    table: Param<Tensor<2, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

fn mixed(seed: u64, device: &SpDevice) -> Mixed {
    device.seeded(seed, |device| {
        let number = seed as i64;
        let half = Tensor::<1>::full([5], seed as f64, device).cast(DType::BF16);
        Mixed {
            linear: LinearConfig::new(3, 3).init(device),
            frozen: LinearConfig::new(3, 1).init(device).no_grad(),
            half: Param::initialized(ParamId::new(), half),
            table: Param::initialized(ParamId::new(), Tensor::from_data([[number, -1], [7, 1 << 30]], device)),
            mask: Param::initialized(ParamId::new(), Tensor::from_data([seed == 1, true, false], device)),
        }
    })
}

fn everything(module: &Mixed) -> Vec<TensorData> {
    vec![
        module.linear.weight.val().into_data(),
        module.frozen.weight.val().into_data(),
        module.half.val().into_data(),
        module.table.val().into_data(),
        module.mask.val().into_data(),
    ]
}

fn step(module: Mixed, optimizer: &mut ModuleOptimizer, device: &SpDevice) -> Mixed {
    let x = Tensor::<2>::ones([2, 3], device.device());
    let y = module.frozen.forward(module.linear.forward(x));
    let gradients = GradientsParams::from_grads((y.clone() * y).sum().backward(), &module);
    let gradients = sum_gradients(&module, gradients, &Default::default(), device.mesh());
    optimizer.step(0.1, module, gradients)
}

fn info(step: u64) -> StateInfo {
    let config = serde_json::Value::Null;
    StateInfo { step, seed: 1, config }
}

/// Trains two steps, saves, trains one; then on other ranks from the saved ones.
fn survives(folder: &Path, optimizer: impl Fn() -> ModuleOptimizer + Sync) {
    let shape = mesh(2, 1, 1);
    let unbroken = ranks(shape, |device| {
        let (mut module, mut optimizer) = (mixed(1, &device), optimizer());
        for _ in 0..2 {
            module = step(module, &mut optimizer, &device);
        }
        let store = StateStore::new(folder, &device);
        store.save(&info(2), &module, &optimizer).unwrap();
        everything(&step(module, &mut optimizer, &device))
    });
    let resumed = ranks(shape, |device| {
        let store = StateStore::new(folder, &device);
        let (module, mut optimizer, _) = store.load(mixed(2, &device), optimizer()).unwrap();
        assert!(module.linear.weight.val().is_require_grad() && !module.frozen.weight.val().is_require_grad());
        everything(&step(module, &mut optimizer, &device))
    });
    assert_eq!(unbroken, resumed);
}

#[test]
fn modules_of_all_kinds_survive() {
    survives(&folder("mixed"), || SgdConfig::new().init());
}

#[test]
fn optimizers_of_all_kinds_survive() {
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    survives(&folder("momentum"), || momentum.init());
    // Its state has another shape than the parameter.
    survives(&folder("adafactor"), || AdafactorConfig::new().init());
}

/// Before the first step an optimizer has no state.
#[test]
fn a_run_that_has_not_begun_can_be_saved() {
    let folder = folder("begun");
    let found = ranks(MeshShape::default(), |device| {
        let store = StateStore::new(&folder, &device);
        let saved = mixed(1, &device);
        store.save(&info(0), &saved, &SgdConfig::new().init()).unwrap();
        let (loaded, _, info) = store.load(mixed(2, &device), SgdConfig::new().init()).unwrap();
        (everything(&saved) == everything(&loaded), info.step)
    });
    assert_eq!(found, [(true, 0)]);
    assert!(Device::flex() == Device::default());
}
