//! A tiny random model and its input.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::seeded;
use burn_sp_models::video_dit::{VideoDit, VideoDitConfig, VideoGrid};
use burn_sp_tests::cast;

use crate::common::{noise, tensor};

/// 3 heads of 8 elements, which turn by frame, row and column.
pub fn config() -> VideoDitConfig {
    VideoDitConfig {
        text_dim: 5,
        frequencies: 6,
        ..VideoDitConfig::new(3, 24, 11, 3, 2)
    }
}

/// Every parameter random: at its start the model's output is 0, and so are most gradients.
pub fn model(dtype: DType) -> VideoDit {
    let model = seeded(&Device::flex(), 5, |device| config().init(device));
    cast(model.map(&mut Random { next: 1 }), dtype)
}

struct Random {
    next: u64,
}

impl ModuleMapper for Random {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.next += 1;
        let seed = self.next;
        param.map(|start| {
            let dims = start.dims();
            // Weights as large as keep a layer's output as large as its input; all else around its start.
            let scale = if D == 2 { 1.7 / (dims[0] as f64).sqrt() } else { 0.3 };
            let random = noise(seed, dims.iter().product());
            let random = tensor(&random, dims, start.dtype(), &start.device()).mul_scalar(scale);
            if D == 2 { random } else { start.detach() + random }
        })
    }
}

/// Latents of a sequence that holds the video so often, `[batch, 3, frames, 2 rows, 2 columns]`, other ones for each seed.
pub fn latents(seed: u64, batch: usize, grid: &VideoGrid, copies: usize) -> TensorData {
    let shape = [batch, 3, copies * grid.frames, 2 * grid.rows, 2 * grid.columns];
    TensorData::new(noise(seed, shape.iter().product()), shape)
}

/// Another for every frame; of two copies, the first is clean.
pub fn times(batch: usize, grid: &VideoGrid, copies: usize) -> TensorData {
    let frames = copies * grid.frames;
    let time = |index: usize| match index % frames {
        frame if frame + grid.frames < frames => 0.0,
        _ => (index * 389 % 1000) as f64,
    };
    TensorData::new((0..batch * frames).map(time).collect::<Vec<_>>(), [batch, frames])
}

/// 4 tokens of text.
pub fn text(batch: usize) -> TensorData {
    TensorData::new(noise(72, batch * 4 * 5), [batch, 4, 5])
}
