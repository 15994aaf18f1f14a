//! What is kept in host memory does not take the device's. A file of its own: the device's pools belong to the process.

mod common;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_sp::train::{Keep, checkpoint_with};

const PARTS: usize = 8;
const ROWS: usize = 2048;
const FEATURES: usize = 256;

/// Bytes in use when forward is done, and the gradient of the input.
fn run(keep: Keep) -> (u64, Vec<f64>) {
    let device = Device::wgpu(Default::default()).autodiff();
    let layer = burn_sp::seeded(&device, 3, |device| {
        LinearConfig::new(FEATURES, FEATURES).with_bias(false).init(device)
    });
    let whole = common::tensor(
        &common::noise(5, ROWS * FEATURES),
        [ROWS, FEATURES],
        burn::tensor::DType::F32,
        &device,
    );
    let whole = whole.require_grad();
    let mut x = whole.clone();
    for _ in 0..PARTS {
        x = checkpoint_with(keep, &layer, x, |layer: &Linear, x: Tensor<2>| layer.forward(x).tanh());
    }
    device.sync().expect("the device is done");
    let held = device.memory_pool_usage().expect("the pools are known").bytes_in_use;
    let grads = x.sum().backward();
    (held, common::f64s(&whole.grad(&grads).expect("a gradient")))
}

#[test]
fn inputs_kept_on_the_host_leave_the_device() {
    // The first run also fills what the device keeps for good.
    let (_, warm) = run(Keep::Device);
    let (device, on_device) = run(Keep::Device);
    let (host, on_host) = run(Keep::Host);
    assert_eq!(on_host, on_device);
    assert_eq!(on_device, warm);
    // All but the first, which is the caller's.
    let inputs = ((PARTS - 1) * ROWS * FEATURES * 4) as u64;
    assert!(
        device >= host + inputs * 9 / 10,
        "{device} bytes with inputs on the device, {host} without, which are {inputs}"
    );
}
