use burn::module::Module;
use burn_sp::SpTensor;

use super::block::{activated, stage};
use super::{CausalConv3d, ChannelNorm, MidBlock, RepeatUp, ResidualBlock, Upsample};

/// A stage of the decoder: residual blocks, then more pixels and frames.
#[derive(Module, Debug)]
pub struct UpBlock {
    /// The blocks, to the stage's channels: one more than in the encoder.
    pub resnets: Vec<ResidualBlock>,
    /// To the next stage, unless it is the last.
    pub upsampler: Option<Upsample>,
    /// Around the whole stage, in Wan 2.2, unless it is the last.
    pub shortcut: Option<RepeatUp>,
}

impl UpBlock {
    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`; see [`Upsample::forward`]
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        let shortcut = self.shortcut.as_ref().map(|shortcut| shortcut.forward(x.clone()));
        let resample = |y| match &self.upsampler {
            Some(upsampler) => upsampler.forward(y),
            None => y,
        };
        stage(x, &self.resnets, resample, shortcut)
    }
}

/// From latents to pixels.
#[derive(Module, Debug)]
pub struct Decoder {
    /// From the latents' channels.
    pub conv_in: CausalConv3d,
    /// At the size of the latents.
    pub mid_block: MidBlock,
    /// The stages.
    pub up_blocks: Vec<UpBlock>,
    /// Norm before the last layer.
    pub norm_out: ChannelNorm<4>,
    /// To the pixels' channels.
    pub conv_out: CausalConv3d,
}

impl Decoder {
    /// # Shapes
    /// - `x`: `[batch, latent channels, latents, height, width]`; returns `[batch, pixel channels, frames, height * stride,
    ///   width * stride]`
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        let mut x = self.mid_block.forward(self.conv_in.forward(x));
        for block in &self.up_blocks {
            x = block.forward(x);
        }
        self.conv_out.forward(activated(&self.norm_out, x))
    }
}
