use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor, module::conv3d, ops::ConvOptions};
use burn_sp::SpTensor;
use burn_sp::layout::Window;

use super::frames::windowed;

/// Configuration of [`CausalConv3d`].
#[derive(Config, Debug)]
pub struct CausalConv3dConfig {
    /// Channels in and out.
    pub channels: [usize; 2],
    /// Width in time, height and width; odd in the last two.
    pub kernel_size: [usize; 3],
    /// Stride in time, height and width.
    #[config(default = "[1, 1, 1]")]
    pub stride: [usize; 3],
}

impl CausalConv3dConfig {
    /// Initial values as Burn's `Conv3d` and PyTorch's: uniform, by the number of inputs of an output.
    pub fn init(&self, device: &Device) -> CausalConv3d {
        let [input, output] = self.channels;
        let [time, height, width] = self.kernel_size;
        let fan_in = Some(input * time * height * width);
        let initializer = Initializer::KaimingUniform {
            gain: 1.0 / 3f64.sqrt(),
            fan_out_only: false,
        };
        CausalConv3d {
            weight: initializer.init_with([output, input, time, height, width], fan_in, None, device),
            bias: initializer.init_with([output], fan_in, None, device),
            kernel_size: self.kernel_size,
            stride: self.stride,
        }
    }
}

/// A 3-D convolution that sees no later frame: output frame `u` reads input frames `stride * u - width + 1 ..= stride * u`.
/// Frames before the clip are zeros, and so is what surrounds a frame, by half the kernel's size.
///
/// Where frames are sharded, each rank gets the few before its own from the ranks that hold them.
#[derive(Module, Debug)]
pub struct CausalConv3d {
    /// `[channels out, channels in, time, height, width]`
    pub weight: Param<Tensor<5>>,
    /// `[channels out]`
    pub bias: Param<Tensor<1>>,
    /// Width in time, height and width.
    pub kernel_size: [usize; 3],
    /// Stride in time, height and width.
    pub stride: [usize; 3],
}

impl CausalConv3d {
    /// # Shapes
    /// - `x`: `[batch, channels in, frames, height, width]`; returns `[batch, channels out, frames / stride, height /
    ///   stride, width / stride]`, rounded up
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        windowed(x, self.window(), |x, _| self.convolve(x))
    }

    /// Which frames an output frame reads.
    pub fn window(&self) -> Window {
        Window::new(self.kernel_size[0] - 1).down(self.stride[0])
    }

    /// Without anything before the frames given.
    ///
    /// # Shapes
    /// - as [`forward`](Self::forward), but the output has `(frames - width in time) / stride + 1` frames, rounded down
    pub(super) fn convolve(&self, x: Tensor<5>) -> Tensor<5> {
        let [_, height, width] = self.kernel_size;
        let options = ConvOptions::new(self.stride, [0, height / 2, width / 2], [1; 3], 1);
        conv3d(x, self.weight.val(), Some(self.bias.val()), options)
    }
}
