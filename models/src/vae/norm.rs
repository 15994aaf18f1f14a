use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};

/// Wan's root mean square norm over the channels: `x / max(|x|, 1e-12) * sqrt(channels) * gamma`, where `|x|` is the length
/// of a pixel's vector of channels.
#[derive(Module, Debug)]
pub struct ChannelNorm<const D: usize> {
    /// The weight, `[channels, 1, 1]` for pictures and `[channels, 1, 1, 1]` for clips.
    pub gamma: Param<Tensor<D>>,
}

impl<const D: usize> ChannelNorm<D> {
    /// A norm with weight 1.
    pub fn new(channels: usize, device: &Device) -> Self {
        let mut shape = [1; D];
        shape[0] = channels;
        Self {
            gamma: Initializer::Ones.init(shape, device),
        }
    }

    /// # Shapes
    /// - `x`: `[batch, channels, ...]`, one dimension more than the weight
    pub fn forward<const X: usize>(&self, x: Tensor<X>) -> Tensor<X> {
        let channels = x.dims()[1] as f64;
        // Bounded before the root is taken, whose slope at 0 is infinite.
        let length = x.clone().square().sum_dim(1).clamp_min(1e-24).sqrt();
        x / length * self.gamma.val().mul_scalar(channels.sqrt()).unsqueeze::<X>()
    }
}
