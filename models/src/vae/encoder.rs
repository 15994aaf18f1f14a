use burn::module::Module;
use burn_sp::SpTensor;
use burn_sp::layout::Window;

use super::block::{activated, stage};
use super::{AverageDown, CausalConv3d, ChannelNorm, Downsample, MidBlock, ResidualBlock};

/// A stage of the encoder: residual blocks, then fewer pixels and frames.
#[derive(Module, Debug)]
pub struct DownBlock {
    /// The blocks, to the stage's channels.
    pub resnets: Vec<ResidualBlock>,
    /// To the next stage, unless it is the last.
    pub downsampler: Option<Downsample>,
    /// Around the whole stage, in Wan 2.2.
    pub shortcut: Option<AverageDown>,
}

impl DownBlock {
    /// # Shapes
    /// - `x`: `[batch, channels, frames, height, width]`; see [`Downsample::forward`]
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        // Its exchange comes before any other after `x`, on all ranks: so it does in backward, where it is the last.
        let shortcut = self.shortcut.as_ref().map(|shortcut| shortcut.forward(x.clone()));
        let resample = |y| match &self.downsampler {
            Some(downsampler) => downsampler.forward(y),
            None => y,
        };
        stage(x, &self.resnets, resample, shortcut)
    }

    /// What its layers read, in order. The shortcut reads less.
    pub fn windows(&self) -> Vec<Window> {
        let resnets = self.resnets.iter().flat_map(ResidualBlock::windows);
        resnets
            .chain(self.downsampler.as_ref().and_then(Downsample::window))
            .collect()
    }
}

/// From pixels to the mean and log variance of latents.
#[derive(Module, Debug)]
pub struct Encoder {
    /// From the pixels' channels.
    pub conv_in: CausalConv3d,
    /// The stages.
    pub down_blocks: Vec<DownBlock>,
    /// At the size of the latents.
    pub mid_block: MidBlock,
    /// Norm before the last layer.
    pub norm_out: ChannelNorm<4>,
    /// To twice the latents' channels.
    pub conv_out: CausalConv3d,
}

impl Encoder {
    /// # Shapes
    /// - `x`: `[batch, pixel channels, frames, height, width]`; returns `[batch, 2 * latent channels, latents, height /
    ///   stride, width / stride]`
    #[track_caller]
    pub fn forward(&self, x: SpTensor<5>) -> SpTensor<5> {
        let mut x = self.conv_in.forward(x);
        for block in &self.down_blocks {
            x = block.forward(x);
        }
        let x = self.mid_block.forward(x);
        self.conv_out.forward(activated(&self.norm_out, x))
    }

    /// What its layers read, in order.
    pub fn windows(&self) -> Vec<Window> {
        let blocks = self.down_blocks.iter().flat_map(DownBlock::windows);
        std::iter::once(self.conv_in.window())
            .chain(blocks)
            .chain(self.mid_block.windows())
            .chain([self.conv_out.window()])
            .collect()
    }
}
