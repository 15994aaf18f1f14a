//! The shortcuts around whole stages that Wan 2.2 has. They have no parameters.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_sp::SpTensor;
use burn_sp::layout::Window;

use super::frames::{TIME, framewise, windowed};

/// Makes channels of the pixels that become one, and as many channels as asked for by the mean of neighbouring ones.
#[derive(Module, Debug)]
pub struct AverageDown {
    /// Channels of the result.
    pub channels: usize,
    /// How many frames become one: 1 or 2. Before the first frame, zeros.
    pub time: usize,
    /// How many pixels of a row, and of a column, become one.
    pub space: usize,
}

impl AverageDown {
    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`; returns `[batch, other channels, frames / time (rounded up),
    ///   height / space, width / space]`
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        match self.time {
            1 => framewise(x, |x| self.average(x)),
            time => windowed(x, Window::new(time - 1).down(time), |x, _| self.average(x)),
        }
    }

    fn average(&self, x: Tensor<5>) -> Tensor<5> {
        let [batch, channels, frames, height, width] = x.dims();
        let (time, space) = (self.time, self.space);
        let (frames, height, width) = (frames / time, height / space, width / space);
        let merged = channels * time * space * space / self.channels;
        x.reshape([batch, channels, frames, time, height, space, width, space])
            .permute([0, 1, 3, 5, 7, 2, 4, 6])
            .reshape([batch, self.channels, merged, frames, height, width])
            .mean_dim(2)
            .reshape([batch, self.channels, frames, height, width])
    }
}

/// Makes pixels of channels, each repeated as often as needed.
#[derive(Module, Debug)]
pub struct RepeatUp {
    /// Channels of the result.
    pub channels: usize,
    /// How many frames one becomes, but the first stays one: its last.
    pub time: usize,
    /// How many pixels of a row, and of a column, one becomes.
    pub space: usize,
}

impl RepeatUp {
    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`; returns `[batch, other channels, time * (frames - 1) + 1,
    ///   space * height, space * width]`
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        match self.time {
            1 => framewise(x, |x| self.repeat(x)),
            time => windowed(x, Window::new(0).up(time), |x, first| {
                let y = self.repeat(x);
                if first > 0 {
                    return y;
                }
                let frames = y.dims()[TIME];
                y.narrow(TIME, time - 1, frames + 1 - time)
            }),
        }
    }

    fn repeat(&self, x: Tensor<5>) -> Tensor<5> {
        let [batch, channels, frames, height, width] = x.dims();
        let (time, space) = (self.time, self.space);
        let times = self.channels * time * space * space / channels;
        x.reshape([batch, channels, 1, frames, height, width])
            .expand([batch, channels, times, frames, height, width])
            .reshape([batch, self.channels, time, space, space, frames, height, width])
            .permute([0, 1, 5, 2, 6, 3, 7, 4])
            .reshape([batch, self.channels, frames * time, height * space, width * space])
    }
}
