//! A language model as one writes it with Burn, and its training on one device.

use std::error::Error;
use std::fs;
use std::path::Path;

use burn::nn::attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_sp::prelude::*;

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
    pub fn forward(&self, x: SpTensor<3>) -> SpTensor<3> {
        let y = multi_head_attention(&self.mha, x.clone(), &Mask::Causal.into());
        (x + y).tokenwise(|x| self.feed_forward(self.norm1.forward(x)))
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
    pub fn loss(&self, tokens: SpTensor<2, Int>, labels: SpTensor<2, Int>) -> LossShare {
        let positions = tokens.position_ids(1);
        let x = tokens.tokenwise(|tokens| self.embedding.forward(tokens) + self.positions.forward(positions));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        cross_entropy(x, self.head.weight.val(), &labels)
    }
}

/// Trains a model and returns the loss of each step.
pub fn train(mut model: Model, batches: &[Batch], device: &SpDevice) -> Vec<f64> {
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for [tokens, labels] in batches.iter().cloned() {
        let [tokens, labels] = [tokens, labels].map(|whole| device.distribute_tokens(whole));
        let loss = model.loss(tokens, labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = sum_gradients(&model, gradients, &ParamLayouts::replicated(), device.mesh());
        model = optimizer.step(1e-3, model, gradients);
        losses.push(loss.value());
    }
    losses
}

/// Trains on a text and prints the losses.
pub fn run(text: &Path) -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(7);
    let model = ModelConfig::new(256, 512, 64, 4, 2).init(&device);
    let data = batches(&fs::read(text)?, &device);
    let ranks = LaunchConfig::new(MeshShape::ulysses(4));
    let losses = launch_module(&ranks, &device, model, |at, model| train(model, &data, &at))?;
    println!("{losses:.4?}");
    Ok(())
}
