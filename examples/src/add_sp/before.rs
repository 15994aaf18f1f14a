//! A language model as one writes it with Burn, and its training on one device.

use std::error::Error;
use std::fs;
use std::path::Path;

use burn::nn::attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;

use super::{Batch, batches};

/// Configuration of [`Model`].
#[derive(Config, Debug)]
pub struct ModelConfig {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// The longest sequence.
    pub max_tokens: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Blocks.
    pub layers: usize,
}

impl ModelConfig {
    /// A model with random weights.
    pub fn init(&self, device: &Device) -> Model {
        let block = |_| Block {
            mha: MultiHeadAttentionConfig::new(self.hidden, self.heads)
                .with_dropout(0.0)
                .init(device),
            norm1: LayerNormConfig::new(self.hidden).init(device),
            mlp: PositionWiseFeedForwardConfig::new(self.hidden, 4 * self.hidden)
                .with_dropout(0.0)
                .init(device),
            norm2: LayerNormConfig::new(self.hidden).init(device),
        };
        Model {
            embedding: EmbeddingConfig::new(self.vocab_size, self.hidden).init(device),
            positions: EmbeddingConfig::new(self.max_tokens, self.hidden).init(device),
            blocks: (0..self.layers).map(block).collect(),
            head: LinearConfig::new(self.hidden, self.vocab_size)
                .with_bias(false)
                .init(device),
        }
    }
}

/// Attention and MLP, each added to the residual stream and normed.
#[derive(Module, Debug)]
pub struct Block {
    mha: MultiHeadAttention,
    norm1: LayerNorm,
    mlp: PositionWiseFeedForward,
    norm2: LayerNorm,
}

impl Block {
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let mask = nn::attention::generate_autoregressive_mask(x.dims()[0], x.dims()[1], &x.device());
        let y = nn::attention::MhaInput::self_attn(x.clone()).mask_attn(mask);
        self.feed_forward(self.norm1.forward(x + self.mha.forward(y).context))
    }

    fn feed_forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.norm2.forward(x.clone() + self.mlp.forward(x))
    }
}

/// A decoder-only language model.
#[derive(Module, Debug)]
pub struct Model {
    embedding: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    head: Linear,
}

impl Model {
    /// The mean cross entropy of the next tokens.
    ///
    /// # Shapes
    /// - `tokens`, `labels`: `[batch, tokens]`
    pub fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<1> {
        let positions = Tensor::arange(0..tokens.dims()[1] as i64, &tokens.device()).unsqueeze();
        let x = self.embedding.forward(tokens) + self.positions.forward(positions);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let loss = nn::loss::CrossEntropyLossConfig::new().init(&x.device());
        loss.forward(self.head.forward(x).flatten(0, 1), labels.flatten(0, 1))
    }
}

/// Trains a model and returns the loss of each step.
pub fn train(mut model: Model, batches: &[Batch]) -> Vec<f64> {
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for [tokens, labels] in batches.iter().cloned() {
        let loss = model.loss(tokens, labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        losses.push(loss.into_scalar());
    }
    losses
}

/// Trains on a text and prints the losses.
pub fn run(text: &Path) -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(7);
    let model = ModelConfig::new(256, 512, 64, 4, 2).init(&device);
    let data = batches(&fs::read(text)?, &device);
    let losses = train(model, &data);
    println!("{losses:.4?}");
    Ok(())
}
