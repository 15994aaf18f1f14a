use burn::module::Module;
use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::{Device, Tensor};
use burn_sp::SpTensor;
use burn_sp::layout::Window;

use super::frames::{TIME, pictures, windowed, with_first};
use super::{CausalConv3d, CausalConv3dConfig};

/// Half the height and width, and half the frames if it has a convolution in time. The first frame stays alone: `1 + 2 n`
/// frames become `1 + n`, of which the first is not convolved in time.
#[derive(Module, Debug)]
pub struct Downsample {
    /// In each frame, of width 3 and stride 2; zeros on the right and below only.
    pub resample: Conv2d,
    /// In time, of width 3 and stride 2.
    pub time_conv: Option<CausalConv3d>,
}

impl Downsample {
    /// For so many channels, in time too or not.
    pub fn new(channels: usize, in_time: bool, device: &Device) -> Self {
        let time_conv = CausalConv3dConfig::new([channels; 2], [3, 1, 1]).with_stride([2, 1, 1]);
        Self {
            resample: Conv2dConfig::new([channels; 2], [3, 3])
                .with_stride([2, 2])
                .with_padding(PaddingConfig2d::Explicit(0, 0, 1, 1))
                .init(device),
            time_conv: in_time.then(|| time_conv.init(device)),
        }
    }

    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`; returns `[batch, channels, (frames + 1) / 2, height / 2,
    ///   width / 2]`, or all frames
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        let x = pictures(x, |x| self.resample.forward(x));
        match &self.time_conv {
            None => x,
            Some(conv) => windowed(x, conv.window(), |x, first| {
                let y = conv.convolve(x.clone());
                if first > 0 {
                    return y;
                }
                with_first(y, x.narrow(TIME, conv.window().behind(), 1))
            }),
        }
    }

    /// Which frames its convolution in time reads, if it has one.
    pub fn window(&self) -> Option<Window> {
        self.time_conv.as_ref().map(CausalConv3d::window)
    }
}

/// Twice the height and width, and twice the frames if it has a convolution in time. The first frame stays alone: `1 + n`
/// frames become `1 + 2 n`; it is not convolved in time, and to the others it is as if it were zeros.
#[derive(Module, Debug)]
pub struct Upsample {
    /// In each frame, of width 3, after every pixel has become four.
    pub resample: Conv2d,
    /// In time, of width 3, to the channels of two frames.
    pub time_conv: Option<CausalConv3d>,
}

impl Upsample {
    /// From `channels[0]` to `channels[1]`, in time too or not.
    pub fn new(channels: [usize; 2], in_time: bool, device: &Device) -> Self {
        let [input, _] = channels;
        let time_conv = CausalConv3dConfig::new([input, 2 * input], [3, 1, 1]);
        Self {
            resample: Conv2dConfig::new(channels, [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device),
            time_conv: in_time.then(|| time_conv.init(device)),
        }
    }

    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`; returns `[batch, other channels, 2 * frames - 1, 2 * height,
    ///   2 * width]`, or as many frames as before
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        let x = match &self.time_conv {
            None => x,
            Some(conv) => {
                let window = conv.window().up(2);
                windowed(x, window, |x, first| double_frames(conv, x, window, first))
            }
        };
        pictures(x, |x| self.resample.forward(double_pixels(x)))
    }
}

fn double_frames(conv: &CausalConv3d, x: Tensor<5>, window: Window, first: usize) -> Tensor<5> {
    // Where frame 0 lies among these, if it does: zeros came before it, or this rank's outputs begin right after.
    let start = window.missing(first);
    let reads_frame_0 = window.newest(first) <= window.behind();
    let x_without = if reads_frame_0 {
        let mut frame_0 = x.dims().map(|len| 0..len);
        frame_0[TIME] = start..start + 1;
        x.clone().slice_fill(frame_0, 0.0)
    } else {
        x.clone()
    };
    let y = conv.convolve(x_without);
    let [batch, channels, frames, height, width] = y.dims();
    let y = y
        .reshape([batch, 2, channels / 2, frames, height, width])
        .permute([0, 2, 3, 1, 4, 5])
        .reshape([batch, channels / 2, 2 * frames, height, width]);
    if first > 0 {
        return y;
    }
    with_first(y.narrow(TIME, 1, 2 * frames - 1), x.narrow(TIME, start, 1))
}

/// Every pixel four times.
fn double_pixels(x: Tensor<4>) -> Tensor<4> {
    let [batch, channels, height, width] = x.dims();
    x.reshape([batch, channels, height, 1, width, 1])
        .expand([batch, channels, height, 2, width, 2])
        .reshape([batch, channels, 2 * height, 2 * width])
}
