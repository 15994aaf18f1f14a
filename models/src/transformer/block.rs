use burn::module::Module;
use burn::tensor::Tensor;
use burn_sp::attention::AttentionOptions;
use burn_sp::nn::{Dropout, DropoutKey, LayerNorm, RmsNorm, RotaryTable};
use burn_sp::train::{ParamLayouts, checkpoint};
use burn_sp::{SpDevice, SpTensor};

use super::{Mlp, SelfAttention};

/// What backward computes again, instead of forward keeping it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Whole blocks: the residual stream between them is all that is kept. Costs another forward pass.
    Blocks,
    /// Attention, with its norm and the projections of queries, keys and values.
    Attention,
    /// All that comes after attention: its output projection and the MLP.
    AllButAttention,
}

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

    /// See [`RmsNorm::forward_residual`].
    ///
    /// # Shapes
    /// - `x`, `branch`: `[batch, tokens, hidden]`, and so are both results
    #[track_caller]
    pub fn forward_residual(
        &self,
        x: SpTensor<3>,
        branch: SpTensor<3>,
        dropout: Dropout,
        key: Option<DropoutKey>,
    ) -> (SpTensor<3>, SpTensor<3>) {
        match self {
            Norm::Rms(norm) => norm.forward_residual(x, branch, dropout, key),
            Norm::Layer(norm) => norm.forward_residual(x, branch, dropout, key),
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

/// What a block depends on beside the residual stream.
#[derive(Clone, Debug)]
pub struct BlockContext {
    /// Rotary positions, if the model has them.
    pub rotary: Option<RotaryTable>,
    /// Mask, scale and dropout of attention.
    pub attention: AttentionOptions,
    /// Dropout of both branches.
    pub dropout: Dropout,
    /// Names the first of the block's three dropout masks, of which the last is that of the attention weights.
    pub key: Option<DropoutKey>,
}

impl Block {
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result
    #[track_caller]
    pub fn forward(&self, x: SpTensor<3>, context: &BlockContext) -> SpTensor<3> {
        let heads = self.heads(x.clone(), context);
        self.rest((x, heads), context)
    }

    /// [`forward`](Self::forward), computing again in backward what `recompute` says.
    ///
    /// # Shapes
    /// - as [`forward`](Self::forward)
    #[track_caller]
    pub fn forward_with(&self, x: SpTensor<3>, context: &BlockContext, recompute: Recompute) -> SpTensor<3> {
        let own = context.clone();
        match recompute {
            Recompute::None => self.forward(x, context),
            Recompute::Blocks => checkpoint(self, x, move |block: &Block, x| block.forward(x, &own)),
            Recompute::Attention => {
                let heads = checkpoint(self, x.clone(), move |block: &Block, x| block.heads(x, &own));
                self.rest((x, heads), context)
            }
            Recompute::AllButAttention => {
                let heads = self.heads(x.clone(), context);
                checkpoint(self, (x, heads), move |block: &Block, streams| {
                    block.rest(streams, &own)
                })
            }
        }
    }

    /// Up to the heads of attention.
    fn heads(&self, x: SpTensor<3>, context: &BlockContext) -> SpTensor<3> {
        let options = AttentionOptions {
            dropout_key: context.mask(2),
            ..context.attention.clone()
        };
        let x = x.tokenwise(|x| self.norm1.forward(x));
        self.attention.attend(x, context.rotary.as_ref(), &options)
    }

    /// From the residual stream and the heads of attention to the end of the block.
    fn rest(&self, (x, heads): (SpTensor<3>, SpTensor<3>), context: &BlockContext) -> SpTensor<3> {
        let branch = self.attention.project(heads);
        let (x, normed) = self.norm2.forward_residual(x, branch, context.dropout, context.mask(0));
        let branch = self.mlp.forward(normed);
        x + context.dropout.forward(branch, context.mask(1))
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

impl BlockContext {
    fn mask(&self, number: u64) -> Option<DropoutKey> {
        self.key.map(|key| key.layer(key.layer + number))
    }
}
