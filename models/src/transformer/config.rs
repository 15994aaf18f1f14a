use burn::config::Config;
use burn::module::Initializer;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::Device;
use burn_sp::nn::{LayerNormConfig, RmsNormConfig, RotaryScaling};

use super::{Block, Mlp, Norm, SelfAttention, Transformer};

/// How a token knows where it is.
#[derive(Config, Debug, Copy, PartialEq)]
pub enum PositionKind {
    /// Rotary embedding of queries and keys (the two halves of a head turn together); any length.
    Rotary {
        /// Base of the wavelengths.
        theta: f64,
    },
    /// A learned vector per position, added to the token embedding.
    Learned {
        /// Positions that can be used.
        max: usize,
    },
}

/// Which norm stands before attention, before the MLP and at the end.
#[derive(Config, Debug, Copy, PartialEq)]
pub enum NormKind {
    /// Root mean square norm, no bias.
    Rms,
    /// Layer norm with bias.
    Layer,
}

/// Which MLP a block has.
#[derive(Config, Debug, Copy, PartialEq)]
pub enum MlpKind {
    /// `down(silu(gate(x)) * up(x))`.
    SwiGlu,
    /// `down(gelu(up(x)))`, GELU by its tanh approximation as GPT-2 has it.
    Gelu,
}

/// Configuration of [`Transformer`]; [`llama`](Self::llama) and [`gpt2`](Self::gpt2) give the known shapes.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Device;
/// use burn_sp_models::transformer::TransformerConfig;
///
/// // Two key/value heads for four query heads, as later Llamas have.
/// let config = TransformerConfig { kv_heads: 2, ..TransformerConfig::llama(16, 8, 1, 4, 12) };
/// assert_eq!(config.problem(), None);
/// // Embedding and output, queries and output, keys and values, three layers of the MLP, three norms.
/// let parameters = 2 * 16 * 8 + 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12 + 3 * 8;
/// assert_eq!(config.init(&Device::flex()).num_params(), parameters);
///
/// let config = TransformerConfig { kv_heads: 3, ..config };
/// assert_eq!(config.problem().unwrap(), "4 heads cannot share 3 kv_heads; use one of [1, 2, 4]");
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct TransformerConfig {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Width of the residual stream, in elements.
    pub hidden_size: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; a divisor of the query heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Hidden units of the MLP.
    pub ffn_size: usize,
    /// Positions.
    pub positions: PositionKind,
    /// Norms.
    pub norm: NormKind,
    /// MLP.
    pub mlp: MlpKind,
    /// Whether linear layers have biases.
    pub bias: bool,
    /// Whether the output layer is the token embedding, transposed.
    pub tie_embeddings: bool,
    /// Added under the norms' roots.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Probability of dropout after the embedding and on each residual branch.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Probability that an attention weight is dropped.
    #[config(default = 0.0)]
    pub attention_dropout: f64,
    /// Standard deviation of initial weights.
    #[config(default = 0.02)]
    pub init_std: f64,
    /// How the angles of rotary positions are scaled.
    #[config(default = "RotaryScaling::None")]
    pub rotary_scaling: RotaryScaling,
}

impl TransformerConfig {
    /// Llama's shape (Touvron et al., arXiv 2302.13971): rotary positions, RMSNorm, SwiGLU, no biases, untied output.
    pub fn llama(vocab_size: usize, hidden_size: usize, layers: usize, heads: usize, ffn_size: usize) -> Self {
        Self::new(
            vocab_size,
            hidden_size,
            layers,
            heads,
            heads,
            hidden_size / heads.max(1),
            ffn_size,
            PositionKind::Rotary { theta: 10000.0 },
            NormKind::Rms,
            MlpKind::SwiGlu,
            false,
            false,
        )
    }

    /// GPT-2's shape (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019): learned positions,
    /// LayerNorm, GELU, biases, tied output.
    pub fn gpt2(vocab_size: usize, hidden_size: usize, layers: usize, heads: usize, max_positions: usize) -> Self {
        Self::new(
            vocab_size,
            hidden_size,
            layers,
            heads,
            heads,
            hidden_size / heads.max(1),
            4 * hidden_size,
            PositionKind::Learned { max: max_positions },
            NormKind::Layer,
            MlpKind::Gelu,
            true,
            true,
        )
    }

    /// What cannot work, in one line; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        let (theta, max_positions) = match self.positions {
            PositionKind::Rotary { theta } => (theta, 1),
            PositionKind::Learned { max } => (1.0, max),
        };
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn_size", self.ffn_size),
            ("max_positions", max_positions),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Some(format!("{name} is 0; use at least 1"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let works: Vec<_> = (1..=self.heads).filter(|n| self.heads.is_multiple_of(*n)).collect();
            return Some(format!(
                "{} heads cannot share {} kv_heads; use one of {works:?}",
                self.heads, self.kv_heads
            ));
        }
        if matches!(self.positions, PositionKind::Rotary { .. }) && !self.head_dim.is_multiple_of(2) {
            return Some(format!(
                "head_dim {} is odd; rotary positions need an even one",
                self.head_dim
            ));
        }
        for (name, dropout) in [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)] {
            if !(0.0..1.0).contains(&dropout) {
                return Some(format!("{name} {dropout} is not in [0, 1)"));
            }
        }
        if !(theta.is_finite() && theta > 0.0) {
            return Some(format!("theta {theta} is not above 0"));
        }
        for (name, value) in [("epsilon", self.epsilon), ("init_std", self.init_std)] {
            if !(value.is_finite() && value >= 0.0) {
                return Some(format!("{name} {value} is not 0 or above"));
            }
        }
        self.rotary_scaling.problem()
    }

    /// The model, with every parameter drawn at once: its values depend on the device's seed and nothing else.
    ///
    /// # Panics
    /// If the configuration has a [`problem`](Self::problem).
    pub fn init(&self, device: &Device) -> Transformer {
        let model = self.undrawn(device);
        burn_sp::initialize(&model);
        model
    }

    /// The model, whose parameters are drawn when they are first used.
    pub(super) fn undrawn(&self, device: &Device) -> Transformer {
        if let Some(problem) = self.problem() {
            panic!("transformer: {problem}");
        }
        let initializer = || Initializer::Normal {
            mean: 0.0,
            std: self.init_std,
        };
        let linear = |input: usize, output: usize| -> Linear {
            let mut linear = LinearConfig::new(input, output)
                .with_bias(self.bias)
                .with_initializer(initializer())
                .init(device);
            linear.bias = self.bias.then(|| Initializer::Zeros.init([output], device));
            linear
        };
        let embedding = |count: usize| -> Embedding {
            EmbeddingConfig::new(count, self.hidden_size)
                .with_initializer(initializer())
                .init(device)
        };
        let norm = || match self.norm {
            NormKind::Rms => Norm::Rms(
                RmsNormConfig::new(self.hidden_size)
                    .with_epsilon(self.epsilon)
                    .init(device),
            ),
            NormKind::Layer => Norm::Layer(
                LayerNormConfig::new(self.hidden_size)
                    .with_epsilon(self.epsilon)
                    .init(device),
            ),
        };
        let block = |_| Block {
            norm1: norm(),
            attention: SelfAttention {
                query: linear(self.hidden_size, self.heads * self.head_dim),
                key: linear(self.hidden_size, self.kv_heads * self.head_dim),
                value: linear(self.hidden_size, self.kv_heads * self.head_dim),
                output: linear(self.heads * self.head_dim, self.hidden_size),
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
            },
            norm2: norm(),
            mlp: Mlp {
                gate: (self.mlp == MlpKind::SwiGlu).then(|| linear(self.hidden_size, self.ffn_size)),
                up: linear(self.hidden_size, self.ffn_size),
                down: linear(self.ffn_size, self.hidden_size),
                ffn_size: self.ffn_size,
            },
        };
        Transformer {
            embedding: embedding(self.vocab_size),
            positions: match self.positions {
                PositionKind::Learned { max } => Some(embedding(max)),
                PositionKind::Rotary { .. } => None,
            },
            blocks: (0..self.layers).map(block).collect(),
            norm: norm(),
            head: (!self.tie_embeddings).then(|| {
                LinearConfig::new(self.hidden_size, self.vocab_size)
                    .with_bias(false)
                    .with_initializer(initializer())
                    .init(device)
            }),
            rotary_theta: match self.positions {
                PositionKind::Rotary { theta } => Some(theta),
                PositionKind::Learned { .. } => None,
            },
            rotary_scaling: self.rotary_scaling,
            vocab_size: self.vocab_size,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused() {
        let (llama, gpt2) = (
            TransformerConfig::llama(8, 12, 1, 6, 8),
            TransformerConfig::gpt2(8, 12, 1, 6, 4),
        );
        assert_eq!((llama.problem(), gpt2.problem()), (None, None));
        let exact = TransformerConfig {
            epsilon: 0.0,
            init_std: 0.0,
            ..llama.clone()
        };
        assert_eq!(exact.problem(), None);
        let of = |from: &TransformerConfig, change: &dyn Fn(&mut TransformerConfig)| {
            let mut config = from.clone();
            change(&mut config);
            config.problem().expect("a problem")
        };
        for (found, expected) in [
            (of(&llama, &|config| config.heads = 0), "heads is 0; use at least 1"),
            (
                of(&llama, &|config| config.kv_heads = 4),
                "6 heads cannot share 4 kv_heads; use one of [1, 2, 3, 6]",
            ),
            (
                of(&llama, &|config| config.head_dim = 3),
                "head_dim 3 is odd; rotary positions need an even one",
            ),
            (
                of(&gpt2, &|config| config.positions = PositionKind::Learned { max: 0 }),
                "max_positions is 0; use at least 1",
            ),
            (of(&gpt2, &|config| config.dropout = 1.0), "dropout 1 is not in [0, 1)"),
            (
                of(&gpt2, &|config| config.attention_dropout = f64::NAN),
                "attention_dropout NaN is not in [0, 1)",
            ),
            (
                of(&gpt2, &|config| config.epsilon = -1e-5),
                "epsilon -0.00001 is not 0 or above",
            ),
            (
                of(&gpt2, &|config| config.init_std = f64::NAN),
                "init_std NaN is not 0 or above",
            ),
        ] {
            assert_eq!(found, expected);
        }
        for (theta, shown) in [(0.0, "0"), (-1.0, "-1"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            let found = of(&llama, &|config| config.positions = PositionKind::Rotary { theta });
            assert_eq!(found, format!("theta {shown} is not above 0"));
        }
    }
}
