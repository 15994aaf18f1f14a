use std::f64::consts::TAU;

use burn::tensor::{Device, Tensor, TensorData};
use burn_sp::kernels::philox::Philox;

/// Keeps the clips' random numbers apart from those of dropout.
const STREAM: u64 = 1 << 62;

/// Plane waves that move over a square: each pair of channels is the cosine and the sine of one, with a direction and a
/// speed of its own in each clip. The frame to come follows from two frames before, not from one.
///
/// A function of seed and step; every rank makes the same.
///
/// # Shapes
/// - `shape`: `[batch, frames, pixels, channels]`, and so is the result
pub fn clips(seed: u64, step: u64, shape: [usize; 4], device: &Device) -> Tensor<4> {
    let [batch, frames, pixels, channels] = shape;
    let words = Philox::new(seed, STREAM | step);
    let width = (1..).find(|width| width * width >= pixels).unwrap_or(1);
    let mut values = Vec::with_capacity(shape.iter().product());
    for clip in 0..batch {
        for frame in 0..frames {
            for pixel in 0..pixels {
                let place = [pixel / width, pixel % width].map(|at| at as f64 / width as f64);
                for channel in 0..channels {
                    let wave = (clip * channels + channel / 2) as u64;
                    let draw = |number: u64| f64::from(words.word(4 * wave + number)) / f64::from(u32::MAX);
                    let turns = draw(0) + (draw(1) * place[0] + draw(2) * place[1]) + draw(3) * frame as f64 / 4.0;
                    let quarter = (channel % 2) as f64 / 4.0;
                    values.push((TAU * (turns - quarter)).cos() as f32);
                }
            }
        }
    }
    Tensor::from_data(TensorData::new(values, shape), device)
}
