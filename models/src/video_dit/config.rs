use burn::config::Config;
use burn::module::Initializer;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use burn_sp::nn::{LayerNormConfig, RmsNormConfig};

use super::{TextEmbedding, TimeEmbedding, VideoAttention, VideoBlock, VideoDit, VideoHead};
use crate::transformer::Mlp;

/// Standard deviation of the initial weights of the embeddings of times and texts.
const EMBEDDING_STD: f64 = 0.02;

/// Configuration of [`VideoDit`]; [`wan_1_3b`](Self::wan_1_3b) and [`wan_5b`](Self::wan_5b) give the known shapes.
#[derive(Config, Debug)]
pub struct VideoDitConfig {
    /// Channels of the latents, which are also those of the output.
    pub channels: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Hidden units of the MLP.
    pub ffn_size: usize,
    /// Heads of attention; a divisor of the width.
    pub heads: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Width of the text encoder's states.
    #[config(default = 4096)]
    pub text_dim: usize,
    /// Cosines and sines of a time, half each.
    #[config(default = 256)]
    pub frequencies: usize,
    /// Latents of a patch from top to bottom, and from left to right; a patch is of one frame.
    #[config(default = 2)]
    pub patch_size: usize,
    /// Added under the norms' roots.
    #[config(default = 1e-6)]
    pub epsilon: f64,
}

impl VideoDitConfig {
    /// Wan 2.1, 1.3 billion parameters.
    pub fn wan_1_3b() -> Self {
        Self::new(16, 1536, 8960, 12, 30)
    }

    /// Wan 2.2, 5 billion parameters.
    pub fn wan_5b() -> Self {
        Self::new(48, 3072, 14336, 24, 30)
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads.max(1)
    }

    /// Parameters of the whole model.
    pub fn parameters(&self) -> usize {
        let linear = |input: usize, output: usize| input * output + output;
        let hidden = self.hidden_size;
        let attention = 4 * linear(hidden, hidden) + 2 * hidden;
        let mlp = linear(hidden, self.ffn_size) + linear(self.ffn_size, hidden);
        let block = 6 * hidden + 2 * attention + 2 * hidden + mlp;
        let time = linear(self.frequencies, hidden) + linear(hidden, hidden) + linear(hidden, 6 * hidden);
        let text = linear(self.text_dim, hidden) + linear(hidden, hidden);
        let head = 2 * hidden + linear(hidden, self.patch_features());
        linear(self.patch_features(), hidden) + time + text + self.layers * block + head
    }

    /// What cannot work, in one line; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        let sizes = [
            ("channels", self.channels),
            ("hidden_size", self.hidden_size),
            ("ffn_size", self.ffn_size),
            ("heads", self.heads),
            ("layers", self.layers),
            ("text_dim", self.text_dim),
            ("frequencies", self.frequencies),
            ("patch_size", self.patch_size),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Some(format!("{name} is 0; use at least 1"));
        }
        if !self.hidden_size.is_multiple_of(2 * self.heads) {
            return Some(format!(
                "hidden_size {} is not {} heads of an even number of elements, which rotary positions need",
                self.hidden_size, self.heads
            ));
        }
        if !self.frequencies.is_multiple_of(2) {
            return Some(format!(
                "frequencies {} is odd; half are cosines, half sines",
                self.frequencies
            ));
        }
        None
    }

    /// The model, with every parameter drawn at once: its values depend on the device's seed and nothing else. The output
    /// layer starts at 0, and so does the velocity.
    ///
    /// # Panics
    /// If the configuration has a [`problem`](Self::problem).
    pub fn init(&self, device: &Device) -> VideoDit {
        if let Some(problem) = self.problem() {
            panic!("video dit: {problem}");
        }
        let hidden = self.hidden_size;
        let xavier = |input, output| linear(input, output, Initializer::XavierUniform { gain: 1.0 }, device);
        let normal = |std| Initializer::Normal { mean: 0.0, std };
        let small = |input, output| linear(input, output, normal(EMBEDDING_STD), device);
        let modulation = |vectors: usize| normal(1.0 / (hidden as f64).sqrt()).init([1, vectors, hidden], device);
        let norm = || RmsNormConfig::new(hidden).with_epsilon(self.epsilon).init(device);
        let attention = || VideoAttention {
            query: xavier(hidden, hidden),
            key: xavier(hidden, hidden),
            value: xavier(hidden, hidden),
            query_norm: norm(),
            key_norm: norm(),
            output: xavier(hidden, hidden),
            heads: self.heads,
            head_dim: self.head_dim(),
        };
        let block = |_| VideoBlock {
            modulation: modulation(6),
            attention: attention(),
            text_norm: LayerNormConfig::new(hidden).with_epsilon(self.epsilon).init(device),
            text_attention: attention(),
            mlp: Mlp {
                gate: None,
                up: xavier(hidden, self.ffn_size),
                down: xavier(self.ffn_size, hidden),
                ffn_size: self.ffn_size,
            },
            epsilon: self.epsilon,
        };
        let model = VideoDit {
            patch: xavier(self.patch_features(), hidden),
            time: TimeEmbedding {
                first: small(self.frequencies, hidden),
                second: small(hidden, hidden),
                projection: xavier(hidden, 6 * hidden),
                frequencies: self.frequencies,
            },
            text: TextEmbedding {
                first: small(self.text_dim, hidden),
                second: small(hidden, hidden),
            },
            blocks: (0..self.layers).map(block).collect(),
            head: VideoHead {
                modulation: modulation(2),
                output: linear(hidden, self.patch_features(), Initializer::Zeros, device),
                epsilon: self.epsilon,
            },
            patch_size: self.patch_size,
            channels: self.channels,
        };
        burn_sp::initialize(&model);
        model
    }

    fn patch_features(&self) -> usize {
        self.channels * self.patch_size * self.patch_size
    }
}

/// A layer whose biases are 0.
fn linear(input: usize, output: usize, weights: Initializer, device: &Device) -> Linear {
    let config = LinearConfig::new(input, output).with_bias(false);
    Linear {
        bias: Some(Initializer::Zeros.init([output], device)),
        ..config.with_initializer(weights).init(device)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::Module;

    use super::*;

    #[test]
    fn the_known_shapes_have_the_known_sizes() {
        assert_eq!(VideoDitConfig::wan_1_3b().parameters(), 1_418_996_800);
        assert_eq!(VideoDitConfig::wan_5b().parameters(), 4_999_787_712);
        assert_eq!(VideoDitConfig::wan_1_3b().head_dim(), 128);
        assert_eq!(VideoDitConfig::wan_5b().head_dim(), 128);
    }

    #[test]
    fn a_model_has_the_parameters_that_its_configuration_counts() {
        let mut config = VideoDitConfig::new(3, 12, 20, 2, 2);
        (config.text_dim, config.frequencies, config.patch_size) = (5, 6, 3);
        assert_eq!(config.init(&Device::flex()).num_params(), config.parameters());
    }

    #[test]
    fn parameters_start_as_wans_do() {
        let model = burn_sp::seeded(&Device::flex(), 3, |device| {
            VideoDitConfig::new(16, 256, 512, 2, 1).with_text_dim(128).init(device)
        });
        fn values<const D: usize>(param: &burn::module::Param<burn::tensor::Tensor<D>>) -> Vec<f64> {
            param.val().into_data().iter::<f64>().collect()
        }
        let is = |values: Vec<f64>, all: f64| values.iter().all(|value| *value == all);
        // Thousands of draws: their deviation is within a few percent of that of their distribution.
        let deviates = |values: Vec<f64>, expected: f64| {
            let found = (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt();
            assert!((found / expected - 1.0).abs() < 0.1, "{found}, expected {expected}");
        };
        let block = &model.blocks[0];
        assert!(is(values(&model.head.output.weight), 0.0));
        assert!(is(values(model.patch.bias.as_ref().expect("a bias")), 0.0));
        assert!(is(values(block.mlp.up.bias.as_ref().expect("a bias")), 0.0));
        assert!(is(values(&block.attention.query_norm.gamma), 1.0));
        assert!(is(values(&block.text_norm.gamma), 1.0) && is(values(&block.text_norm.beta), 0.0));
        deviates(values(&model.time.first.weight), 0.02);
        deviates(values(&model.text.second.weight), 0.02);
        deviates(values(&block.modulation), 1.0 / 16.0);
        for (linear, inputs, outputs) in [
            (&model.patch, 64.0, 256.0),
            (&model.time.projection, 256.0, 1536.0),
            (&block.mlp.down, 512.0, 256.0),
        ] {
            // Uniform within a bound has that bound over the root of 3 as its deviation.
            let bound = f64::sqrt(6.0 / (inputs + outputs));
            let weights = values(&linear.weight);
            assert!(weights.iter().all(|weight| weight.abs() <= bound + 1e-7));
            deviates(weights, bound / f64::sqrt(3.0));
        }
    }

    #[test]
    fn what_cannot_work_is_said() {
        let config = VideoDitConfig::new(4, 64, 128, 4, 2);
        assert_eq!(config.problem(), None);
        let problem = |change: fn(&mut VideoDitConfig)| {
            let mut config = config.clone();
            change(&mut config);
            config.problem().expect("a problem")
        };
        assert_eq!(problem(|config| config.layers = 0), "layers is 0; use at least 1");
        assert!(problem(|config| config.heads = 3).contains("hidden_size 64 is not 3 heads"));
        assert!(problem(|config| config.heads = 64).contains("an even number of elements"));
        assert!(problem(|config| config.frequencies = 3).contains("frequencies 3 is odd"));
    }
}
