//! What the suites share.
#![allow(dead_code, reason = "each suite uses its part")]

use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::{LaunchConfig, SpDevice, launch};

/// Long enough for a machine under load, short enough that a fault shows.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Where suites run: Flex, unless the environment variable `BURN_SP_DEVICE` is `wgpu`.
pub fn device() -> Device {
    match std::env::var("BURN_SP_DEVICE").as_deref() {
        Err(_) | Ok("flex") => Device::flex(),
        #[cfg(feature = "wgpu")]
        Ok("wgpu") => Device::wgpu(Default::default()),
        Ok(other) => panic!("BURN_SP_DEVICE={other}: this build has no such device"),
    }
}

/// Runs the ranks on an autodiff device; none may fail.
pub fn ranks<T: Send>(mesh: MeshShape, body: impl Fn(SpDevice) -> T + Send + Sync) -> Vec<T> {
    launch(&config(mesh), &device().autodiff(), body).unwrap_or_else(|error| panic!("{mesh}: {error}"))
}

/// Runs the ranks, of which one has to fail; returns the report.
pub fn failure(mesh: MeshShape, body: impl Fn(SpDevice) + Send + Sync) -> String {
    match launch(&config(mesh), &device().autodiff(), body) {
        Ok(_) => panic!("{mesh}: no rank failed"),
        Err(error) => error.to_string(),
    }
}

pub fn config(mesh: MeshShape) -> LaunchConfig {
    LaunchConfig::new(mesh).with_timeout(TIMEOUT)
}

/// Every word stands in the text.
#[track_caller]
pub fn contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

pub fn mesh(dp: usize, ring: usize, ulysses: usize) -> MeshShape {
    MeshShape {
        dp,
        ring,
        ulysses,
        tp: 1,
    }
}

/// Those that share tokens alone, of 2 and 4 ranks.
pub fn token_meshes() -> Vec<MeshShape> {
    vec![
        mesh(1, 1, 2),
        mesh(1, 1, 4),
        mesh(1, 2, 1),
        mesh(1, 4, 1),
        mesh(1, 2, 2),
    ]
}

/// The largest absolute value.
pub fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// Samples over dp, tokens over ring (with this split) and ulysses.
pub fn sequence(shape: impl Into<Vec<usize>>, split: Split) -> Layout {
    Layout::replicated(shape)
        .shard(0, Axis::Dp, Split::Contiguous)
        .shard(1, Axis::Ring, split.clone())
        .shard(1, Axis::Ulysses, split)
}

pub fn tensor<const D: usize>(values: &[f64], shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

pub fn f64s<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Numbers in [-1, 1) that look random and are the same everywhere.
pub fn noise(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    // 20 bits, so that f32 holds them exactly.
    (0..count).map(|_| (next() >> 44) as f64 / 524_288.0 - 1.0).collect()
}

/// Element by element, against numbers that no one here made.
#[track_caller]
pub fn near(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance,
            "{what}[{index}]: {found}, the reference {expected}, allowed {tolerance:e}"
        );
    }
}
