use burn::config::Config;
use burn::tensor::Device;

use super::{
    AverageDown, CausalConv3dConfig, ChannelNorm, Decoder, DownBlock, Downsample, Encoder, MidBlock, RepeatUp,
    ResidualBlock, UpBlock, Upsample, Vae,
};

/// Configuration of [`Vae`]; [`wan21`](Self::wan21) and [`wan22`](Self::wan22) give the known shapes.
#[derive(Config, Debug, PartialEq)]
pub struct VaeConfig {
    /// The encoder's channels at full size.
    pub base_channels: usize,
    /// The decoder's channels at full size.
    pub decoder_channels: usize,
    /// Channels of a latent.
    pub latent_channels: usize,
    /// Of each stage of the encoder, its channels as a multiple of those at full size; the decoder goes back.
    pub multipliers: Vec<usize>,
    /// Residual blocks of a stage of the encoder; the decoder has one more.
    pub res_blocks: usize,
    /// Whether the encoder halves the frames between two stages, where it always halves height and width.
    pub temporal: Vec<bool>,
    /// Whether there are shortcuts around whole stages, as in Wan 2.2.
    pub shortcuts: bool,
    /// Squares of so many pixels a side become one pixel with their channels first.
    pub patch_size: usize,
    /// Mean of each channel of the latents, which [`Vae::encode`] takes away.
    pub latent_mean: Vec<f64>,
    /// Standard deviation of each channel of the latents, by which [`Vae::encode`] divides.
    pub latent_std: Vec<f64>,
    /// Channels of a pixel.
    #[config(default = 3)]
    pub pixel_channels: usize,
}

impl VaeConfig {
    /// Wan 2.1: 16 channels, strides 4 (frames), 8 and 8 (pixels).
    pub fn wan21() -> Self {
        Self::new(
            96,
            96,
            16,
            vec![1, 2, 4, 4],
            2,
            vec![false, true, true],
            false,
            1,
            WAN21_MEAN.to_vec(),
            WAN21_STD.to_vec(),
        )
    }

    /// Wan 2.2: 48 channels, strides 4 (frames), 16 and 16 (pixels).
    pub fn wan22() -> Self {
        Self::new(
            160,
            256,
            48,
            vec![1, 2, 4, 4],
            2,
            vec![false, true, true],
            true,
            2,
            WAN22_MEAN.to_vec(),
            WAN22_STD.to_vec(),
        )
    }

    /// How many frames become a latent, but for the first frame, which becomes one alone.
    pub fn temporal_stride(&self) -> usize {
        self.temporal
            .iter()
            .filter(|halves| **halves)
            .fold(1, |stride, _| 2 * stride)
    }

    /// How many pixels of a row, and of a column, become one.
    pub fn spatial_stride(&self) -> usize {
        self.temporal.iter().fold(self.patch_size, |stride, _| 2 * stride)
    }

    /// Why no model can have this configuration, if so.
    pub fn problem(&self) -> Option<String> {
        let stages = self.multipliers.len();
        if stages != self.temporal.len() + 1 {
            return Some(format!(
                "{stages} multipliers and {} steps between stages; give one multiplier more than steps",
                self.temporal.len()
            ));
        }
        let lengths = [self.latent_mean.len(), self.latent_std.len()];
        if lengths != [self.latent_channels; 2] {
            return Some(format!(
                "mean and standard deviation of {} and {} latent channels; give those of {}",
                lengths[0], lengths[1], self.latent_channels
            ));
        }
        let sizes = [
            ("base_channels", self.base_channels),
            ("decoder_channels", self.decoder_channels),
            ("latent_channels", self.latent_channels),
            ("patch_size", self.patch_size),
            ("pixel_channels", self.pixel_channels),
            ("res_blocks", self.res_blocks),
            (
                "the smallest multiplier",
                self.multipliers.iter().copied().min().unwrap_or(0),
            ),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Some(format!("{name} is 0; give at least 1"));
        }
        let mut stages = self.down_channels().into_iter().enumerate();
        let average = stages
            .find(|(stage, [input, output])| self.shortcuts && !(input * self.factor(*stage)).is_multiple_of(*output));
        if let Some((stage, [input, output])) = average {
            return Some(format!(
                "stage {stage} of the encoder has {output} channels, which do not divide the {input} before it times the \
                 pixels that become one"
            ));
        }
        let mut stages = self.up_channels().into_iter().enumerate();
        let repeat = stages.find(|(stage, [input, output])| match self.step_up(*stage) {
            None => false,
            Some(step) if self.shortcuts => !(output * self.factor(step)).is_multiple_of(*input),
            Some(_) => !output.is_multiple_of(2),
        });
        repeat.map(|(stage, [input, output])| {
            format!(
                "stage {stage} of the decoder cannot go from {input} to {output} channels; make multipliers powers of 2"
            )
        })
    }

    /// The model with random weights.
    ///
    /// # Panics
    /// If the configuration has a [`problem`](Self::problem).
    pub fn init(&self, device: &Device) -> Vae {
        if let Some(problem) = self.problem() {
            panic!("vae: {problem}");
        }
        let conv = |channels, width: usize| CausalConv3dConfig::new(channels, [width; 3]).init(device);
        let (patch, latent) = (self.pixel_channels * self.patch_size.pow(2), self.latent_channels);
        let model = Vae {
            encoder: self.encoder(patch, device),
            quant_conv: conv([2 * latent; 2], 1),
            post_quant_conv: conv([latent; 2], 1),
            decoder: self.decoder(patch, device),
            latent_mean: self.latent_mean.clone(),
            latent_std: self.latent_std.clone(),
            temporal_stride: self.temporal_stride(),
            spatial_stride: self.spatial_stride(),
            patch_size: self.patch_size,
        };
        burn_sp::initialize(&model);
        model
    }

    fn encoder(&self, patch: usize, device: &Device) -> Encoder {
        let stages = self.down_channels();
        let last = self.top() * self.base_channels;
        let block = |(stage, [input, output]): (usize, [usize; 2])| {
            let step = self.temporal.get(stage).copied();
            DownBlock {
                resnets: resnets(self.res_blocks, [input, output], device),
                downsampler: step.map(|in_time| Downsample::new(output, in_time, device)),
                shortcut: self.shortcuts.then(|| AverageDown {
                    channels: output,
                    time: if step == Some(true) { 2 } else { 1 },
                    space: if step.is_some() { 2 } else { 1 },
                }),
            }
        };
        Encoder {
            conv_in: CausalConv3dConfig::new([patch, self.base_channels], [3; 3]).init(device),
            down_blocks: stages.into_iter().enumerate().map(block).collect(),
            mid_block: MidBlock::new(last, device),
            norm_out: ChannelNorm::new(last, device),
            conv_out: CausalConv3dConfig::new([last, 2 * self.latent_channels], [3; 3]).init(device),
        }
    }

    fn decoder(&self, patch: usize, device: &Device) -> Decoder {
        let first = self.top() * self.decoder_channels;
        let last = self.multipliers[0] * self.decoder_channels;
        let block = |(stage, [input, output]): (usize, [usize; 2])| {
            let step = self.step_up(stage).map(|step| self.temporal[step]);
            let after = if self.shortcuts { output } else { output / 2 };
            UpBlock {
                resnets: resnets(self.res_blocks + 1, [input, output], device),
                upsampler: step.map(|in_time| Upsample::new([output, after], in_time, device)),
                shortcut: step.filter(|_| self.shortcuts).map(|in_time| RepeatUp {
                    channels: output,
                    time: if in_time { 2 } else { 1 },
                    space: 2,
                }),
            }
        };
        Decoder {
            conv_in: CausalConv3dConfig::new([self.latent_channels, first], [3; 3]).init(device),
            mid_block: MidBlock::new(first, device),
            up_blocks: self.up_channels().into_iter().enumerate().map(block).collect(),
            norm_out: ChannelNorm::new(last, device),
            conv_out: CausalConv3dConfig::new([last, patch], [3; 3]).init(device),
        }
    }

    /// The last stage's multiplier.
    fn top(&self) -> usize {
        self.multipliers.last().copied().unwrap_or(1)
    }

    /// Channels before and after the blocks of each stage of the encoder.
    fn down_channels(&self) -> Vec<[usize; 2]> {
        let after: Vec<usize> = self
            .multipliers
            .iter()
            .map(|times| times * self.base_channels)
            .collect();
        let before = std::iter::once(self.base_channels).chain(after.iter().copied());
        before
            .zip(after.iter().copied())
            .map(|(input, output)| [input, output])
            .collect()
    }

    /// Channels before and after the blocks of each stage of the decoder. Without shortcuts, upsampling halves them.
    fn up_channels(&self) -> Vec<[usize; 2]> {
        let after: Vec<usize> = self
            .multipliers
            .iter()
            .rev()
            .map(|times| times * self.decoder_channels)
            .collect();
        let halved = |channels: usize| if self.shortcuts { channels } else { channels / 2 };
        let first = self.top() * self.decoder_channels;
        let before = std::iter::once(first).chain(after.iter().map(|channels| halved(*channels)));
        before
            .zip(after.iter().copied())
            .map(|(input, output)| [input, output])
            .collect()
    }

    /// The encoder's step that a stage of the decoder takes back, unless it is the last stage.
    fn step_up(&self, stage: usize) -> Option<usize> {
        self.temporal.len().checked_sub(stage + 1)
    }

    /// How many pixels become one after a stage of the encoder.
    fn factor(&self, step: usize) -> usize {
        match self.temporal.get(step) {
            Some(true) => 8,
            Some(false) => 4,
            None => 1,
        }
    }
}

fn resnets(count: usize, [input, output]: [usize; 2], device: &Device) -> Vec<ResidualBlock> {
    (0..count)
        .map(|index| ResidualBlock::new([if index == 0 { input } else { output }, output], device))
        .collect()
}

/// Of the published checkpoints, to four decimals.
const WAN21_MEAN: [f64; 16] = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
    -0.9497, 0.2503, -0.2921,
];
const WAN21_STD: [f64; 16] = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
    2.8251, 1.9160,
];
const WAN22_MEAN: [f64; 48] = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
];
const WAN22_STD: [f64; 48] = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
];
