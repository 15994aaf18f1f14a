use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};
use burn_sp::SpTensor;
use burn_sp::layout::{Split, Window};

use super::frames::framewise;
use super::{CausalConv3d, Decoder, Encoder};

/// A causal video VAE; made by [`VaeConfig`](super::VaeConfig).
///
/// Latent 0 is of frame 0 alone, latent `n >= 1` of the frames `stride * (n - 1) + 1 ..= stride * n`. Frames, and latents,
/// may be sharded over one axis, contiguously and unevenly: each causal convolution exchanges its own halo, and what comes
/// out belongs to the rank that holds the newest frame it depends on. So a clip split by
/// [`frame_split`](Self::frame_split) is encoded to contiguous latents, and these are decoded to that split again.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
/// use burn_sp_models::vae::VaeConfig;
///
/// // Wan 2.1's shape with few channels: strides 4, 8 and 8.
/// let config = VaeConfig {
///     base_channels: 4,
///     decoder_channels: 4,
///     latent_channels: 2,
///     latent_mean: vec![0.0; 2],
///     latent_std: vec![1.0; 2],
///     ..VaeConfig::wan21()
/// };
/// launch(&LaunchConfig::new(MeshShape::ulysses(2)), &Device::flex(), |device: SpDevice| {
///     let vae = device.seeded(1, |device| config.init(device));
///     // 3 latents on 2 ranks, of 9 frames: rank 0 has 5 of them, rank 1 has 4.
///     let layout = Layout::replicated([1, 3, 9, 8, 16]).shard(2, Axis::Ulysses, vae.frame_split(3, 2));
///     let clip = device.distribute(Tensor::<5>::zeros([1, 3, 9, 8, 16], device.device()), &layout);
///     let latents = vae.encode(clip);
///     assert_eq!(latents.global_shape(), [1, 2, 3, 1, 2]);
///     assert_eq!(latents.local().dims()[2], if device.rank() == 0 { 2 } else { 1 });
///     assert_eq!(vae.decode(latents).layout(), &layout);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Vae {
    /// From pixels.
    pub encoder: Encoder,
    /// After the encoder, of width 1.
    pub quant_conv: CausalConv3d,
    /// Before the decoder, of width 1.
    pub post_quant_conv: CausalConv3d,
    /// To pixels.
    pub decoder: Decoder,
    /// Mean of each channel of the latents.
    pub latent_mean: Vec<f64>,
    /// Standard deviation of each channel of the latents.
    pub latent_std: Vec<f64>,
    /// How many frames become a latent, but for the first frame, which becomes one alone.
    pub temporal_stride: usize,
    /// How many pixels of a row, and of a column, become one.
    pub spatial_stride: usize,
    /// How many of those do before the encoder.
    pub patch_size: usize,
}

impl Vae {
    /// The mean and the log variance of the latents, as the encoder has them.
    ///
    /// # Shapes
    /// - `clip`: `[batch, pixel channels, 1 + stride * n, height, width]`, pixels in [-1, 1]
    /// - returns `[batch, 2 * latent channels, 1 + n, height / stride, width / stride]`, the means first
    ///
    /// # Panics
    /// If the clip has another number of frames or other channels, the strides do not divide height and width, or its
    /// frames are sharded over several axes, or in several ranges a rank.
    #[track_caller]
    pub fn moments(&self, clip: SpTensor<5>) -> SpTensor<5> {
        let &[_, _, frames, height, width] = clip.global_shape() else {
            unreachable!("a clip has five dimensions");
        };
        let stride = self.temporal_stride;
        assert!(
            frames == 0 || (frames - 1).is_multiple_of(stride),
            "vae: a clip of {frames} frames does not end with a latent; give 1 + {stride} n frames, say {}",
            frames - (frames - 1) % stride
        );
        let stride = self.spatial_stride;
        assert!(
            height.is_multiple_of(stride) && width.is_multiple_of(stride),
            "vae: frames are of {height} x {width} pixels; give multiples of {stride}"
        );
        let x = framewise(clip, |x| patched(x, self.patch_size));
        self.quant_conv.forward(self.encoder.forward(x))
    }

    /// The latents of a clip: the means, of mean 0 and standard deviation 1 by channel over the data that the VAE was
    /// trained on. What a diffusion model is trained on.
    ///
    /// # Shapes
    /// - `clip`: `[batch, pixel channels, 1 + stride * n, height, width]`, pixels in [-1, 1]
    /// - returns `[batch, latent channels, 1 + n, height / stride, width / stride]`
    ///
    /// # Panics
    /// As [`moments`](Self::moments).
    #[track_caller]
    pub fn encode(&self, clip: SpTensor<5>) -> SpTensor<5> {
        framewise(self.moments(clip), |moments| {
            let means = moments.narrow(1, 0, self.latent_mean.len());
            let (mean, std) = self.channels(&means);
            (means - mean) / std
        })
    }

    /// The clip of latents. Pixels are not cut off at -1 and 1, where they would have no gradient.
    ///
    /// # Shapes
    /// - `latents`: `[batch, latent channels, 1 + n, height, width]`, as [`encode`](Self::encode) returns them
    /// - returns `[batch, pixel channels, 1 + stride * n, height * stride, width * stride]`
    ///
    /// # Panics
    /// If the latents have other channels, or their frames are sharded over several axes, or in several ranges a rank.
    #[track_caller]
    pub fn decode(&self, latents: SpTensor<5>) -> SpTensor<5> {
        let latents = framewise(latents, |latents| {
            let (mean, std) = self.channels(&latents);
            latents * std + mean
        });
        let x = self.decoder.forward(self.post_quant_conv.forward(latents));
        framewise(x, |x| unpatched(x, self.patch_size))
    }

    /// The frames of which latents are: those that come in with them.
    pub fn frames_of(&self, latents: Range<usize>) -> Range<usize> {
        Window::new(0).up(self.temporal_stride).outputs(latents)
    }

    /// The split of frames under which ranks encode contiguous latents, as even as can be, and decode them to.
    pub fn frame_split(&self, latents: usize, ranks: usize) -> Split {
        let parts = Split::Contiguous.parts(latents, ranks);
        let frames = |rank| parts.of(rank).iter().map(|own| self.frames_of(own.clone()));
        Split::ranges((0..ranks).flat_map(frames).collect())
    }

    /// Mean and standard deviation, as `[1, channels, 1, 1, 1]`.
    fn channels(&self, like: &Tensor<5>) -> (Tensor<5>, Tensor<5>) {
        let by_channel = |values: &[f64]| {
            let data = TensorData::new(values.to_vec(), [1, values.len(), 1, 1, 1]);
            Tensor::from_data(data.convert_dtype(like.dtype()), (&like.device(), like.dtype()))
        };
        (by_channel(&self.latent_mean), by_channel(&self.latent_std))
    }
}

/// Squares of pixels become pixels of `(channel, column, row)`, the row fastest.
fn patched(x: Tensor<5>, size: usize) -> Tensor<5> {
    if size == 1 {
        return x;
    }
    let [batch, channels, frames, height, width] = x.dims();
    let (height, width) = (height / size, width / size);
    x.reshape([batch, channels, frames, height, size, width, size])
        .permute([0, 1, 6, 4, 2, 3, 5])
        .reshape([batch, channels * size * size, frames, height, width])
}

/// Takes [`patched`] back.
fn unpatched(x: Tensor<5>, size: usize) -> Tensor<5> {
    if size == 1 {
        return x;
    }
    let [batch, channels, frames, height, width] = x.dims();
    let channels = channels / (size * size);
    x.reshape([batch, channels, size, size, frames, height, width])
        .permute([0, 1, 4, 5, 3, 6, 2])
        .reshape([batch, channels, frames, height * size, width * size])
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// Two channels of a frame of 2 x 4 pixels, which are numbered.
    #[test]
    fn squares_become_channels_column_by_column() {
        let x = Tensor::<1>::from_floats(std::array::from_fn::<f32, 16, _>(|i| i as f32), &Device::flex());
        let x = x.reshape([1, 2, 1, 2, 4]);
        let y = patched(x.clone(), 2);
        assert_eq!(y.dims(), [1, 8, 1, 1, 2]);
        let numbers = y.to_data().iter::<i64>().collect::<Vec<_>>();
        assert_eq!(numbers, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]);
        unpatched(y, 2).to_data().assert_eq(&x.to_data(), true);
    }
}
