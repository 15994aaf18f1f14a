use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Tensor};
use burn_sp::SpTensor;
use burn_sp::attention::{Mask, Positions};
use burn_sp::kernels::{AttentionSpec, HeadMap};
use burn_sp::layout::Window;

use super::frames::{framewise, pictures};
use super::{CausalConv3d, CausalConv3dConfig, ChannelNorm};

/// Norm, SiLU and a causal convolution of width 3, twice, added to the input.
#[derive(Module, Debug)]
pub struct ResidualBlock {
    /// Norm of the input.
    pub norm1: ChannelNorm<4>,
    /// To the block's channels.
    pub conv1: CausalConv3d,
    /// Norm in between.
    pub norm2: ChannelNorm<4>,
    /// The second convolution.
    pub conv2: CausalConv3d,
    /// Brings the input to the block's channels, if it has others.
    pub conv_shortcut: Option<CausalConv3d>,
}

impl ResidualBlock {
    /// From `channels[0]` to `channels[1]`.
    pub fn new(channels: [usize; 2], device: &Device) -> Self {
        let [input, output] = channels;
        Self {
            norm1: ChannelNorm::new(input, device),
            conv1: CausalConv3dConfig::new([input, output], [3; 3]).init(device),
            norm2: ChannelNorm::new(output, device),
            conv2: CausalConv3dConfig::new([output, output], [3; 3]).init(device),
            conv_shortcut: (input != output).then(|| CausalConv3dConfig::new(channels, [1; 3]).init(device)),
        }
    }

    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`; returns the same with the block's channels
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        let y = self.conv1.forward(activated(&self.norm1, x.clone()));
        let y = self.conv2.forward(activated(&self.norm2, y));
        y.add(match &self.conv_shortcut {
            Some(conv) => conv.forward(x),
            None => x,
        })
    }

    /// What its layers read, in order.
    pub fn windows(&self) -> [Window; 2] {
        [self.conv1.window(), self.conv2.window()]
    }
}

/// A stage of the encoder or decoder: residual blocks, then other pixels and frames, and perhaps a shortcut around all.
#[track_caller]
pub(super) fn stage(
    x: SpTensor<5>,
    resnets: &[ResidualBlock],
    resample: impl FnOnce(SpTensor<5>) -> SpTensor<5>,
    shortcut: Option<SpTensor<5>>,
) -> SpTensor<5> {
    let y = resample(resnets.iter().fold(x, |x, resnet| resnet.forward(x)));
    match shortcut {
        Some(shortcut) => y.add(shortcut),
        None => y,
    }
}

/// `silu(norm(x))`
#[track_caller]
pub(super) fn activated(norm: &ChannelNorm<4>, x: SpTensor<5>) -> SpTensor<5> {
    framewise(x, |x| silu(norm.forward(x)))
}

/// Attention between the pixels of each frame, with one head, added to the input.
#[derive(Module, Debug)]
pub struct AttentionBlock {
    /// Norm of the input.
    pub norm: ChannelNorm<3>,
    /// Queries, keys and values, `channels -> 3 * channels`.
    pub to_qkv: Conv2d,
    /// Back to the input's channels.
    pub proj: Conv2d,
}

impl AttentionBlock {
    /// For so many channels.
    pub fn new(channels: usize, device: &Device) -> Self {
        Self {
            norm: ChannelNorm::new(channels, device),
            to_qkv: Conv2dConfig::new([channels, 3 * channels], [1, 1]).init(device),
            proj: Conv2dConfig::new([channels, channels], [1, 1]).init(device),
        }
    }

    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`, and so is the result
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        pictures(x, |x| x.clone() + self.attend(x))
    }

    fn attend(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, channels, height, width] = x.dims();
        let pixels = height * width;
        let qkv = self.to_qkv.forward(self.norm.forward(x));
        let qkv = qkv.reshape([batch, 3, channels, pixels]).swap_dims(2, 3);
        let [q, k, v] = [0, 1, 2].map(|index| qkv.clone().narrow(1, index, 1).swap_dims(1, 2));
        let spec = AttentionSpec {
            mask: Mask::Full,
            q_positions: Positions::whole(pixels),
            k_positions: Positions::whole(pixels),
            scale: 1.0 / (channels as f64).sqrt(),
            heads: HeadMap::new(1, 1),
            dropout: None,
            wide: false,
        };
        let (out, _) = burn_sp::kernels::attention(q, k, v, spec);
        let out = out.reshape([batch, pixels, channels]).swap_dims(1, 2);
        self.proj.forward(out.reshape([batch, channels, height, width]))
    }
}

/// Attention between two residual blocks.
#[derive(Module, Debug)]
pub struct MidBlock {
    /// The blocks around attention: one more.
    pub resnets: Vec<ResidualBlock>,
    /// Attention.
    pub attentions: Vec<AttentionBlock>,
}

impl MidBlock {
    /// For so many channels.
    pub fn new(channels: usize, device: &Device) -> Self {
        let resnet = || ResidualBlock::new([channels; 2], device);
        Self {
            resnets: vec![resnet(), resnet()],
            attentions: vec![AttentionBlock::new(channels, device)],
        }
    }

    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`, and so is the result
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        let mut x = x;
        for (index, resnet) in self.resnets.iter().enumerate() {
            x = resnet.forward(x);
            if let Some(attention) = self.attentions.get(index) {
                x = attention.forward(x);
            }
        }
        x
    }

    /// What its layers read, in order.
    pub fn windows(&self) -> Vec<Window> {
        self.resnets.iter().flat_map(ResidualBlock::windows).collect()
    }
}
