use burn::module::Module;
use burn::tensor::Tensor;
use burn_sp::attention::AttentionOptions;
use burn_sp::nn::{Dropout, DropoutKey, LayerNorm, RmsNorm, RotaryTable};
use burn_sp::train::ParamLayouts;
use burn_sp::{SpDevice, SpTensor};

use super::{Mlp, SelfAttention};

/// The norm that a model is made with.
#[derive(Module, Debug)]
pub enum Norm {
    /// Root mean square norm.
    Rms(RmsNorm),
    /// Layer norm.
    Layer(LayerNorm),
}

impl Norm {
    /// # Shapes
    /// - `x`: `[..., hidden]`, and so is the result
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Norm::Rms(norm) => norm.forward(x),
            Norm::Layer(norm) => norm.forward(x),
        }
    }
}

/// Attention and MLP, each behind a norm and added to the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    /// Norm before attention.
    pub norm1: Norm,
    /// Attention.
    pub attention: SelfAttention,
    /// Norm before the MLP.
    pub norm2: Norm,
    /// MLP.
    pub mlp: Mlp,
}

impl Block {
    /// `dropout` acts on both branches; `key` names the first of three masks, of which the last is that of the attention
    /// weights.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result
    #[track_caller]
    pub fn forward(
        &self,
        x: SpTensor<3>,
        rotary: Option<&RotaryTable>,
        options: &AttentionOptions,
        dropout: Dropout,
        key: Option<DropoutKey>,
    ) -> SpTensor<3> {
        let mask = |number: u64| key.map(|key| key.layer(key.layer + number));
        let options = &AttentionOptions {
            dropout_key: mask(2),
            ..options.clone()
        };
        let branch = self
            .attention
            .forward(x.clone().tokenwise(|x| self.norm1.forward(x)), rotary, options);
        let x = x + dropout.forward(branch, mask(0));
        let branch = self.mlp.forward(x.clone().tokenwise(|x| self.norm2.forward(x)));
        x + dropout.forward(branch, mask(1))
    }

    /// This rank's part; see [`Transformer::shard`](super::Transformer::shard).
    pub fn shard(self, device: &SpDevice, layouts: &mut ParamLayouts) -> Self {
        Self {
            attention: self.attention.shard(device, layouts),
            mlp: self.mlp.shard(device, layouts),
            ..self
        }
    }
}
