use burn::module::Module;
use burn::tensor::Tensor;
use burn_sp::attention::{AttentionCache, AttentionOptions};
use burn_sp::layout::Axis;
use burn_sp::nn::{Dropout, DropoutKey, LayerNorm, RmsNorm, RotaryTable};
use burn_sp::train::{Keep, ParamLayouts, ParamShards, checkpoint_with};
use burn_sp::{SpDevice, SpTensor};

use super::{Mlp, SelfAttention};

/// What backward computes again, instead of forward keeping it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Whole blocks: the residual stream between them is all that is kept (Chen et al., arXiv 1604.06174). Costs
    /// another forward pass.
    Blocks,
    /// Attention, with its norm and the projections of queries, keys and values.
    Attention,
    /// All that comes after attention: its output projection and the MLP.
    AllButAttention,
}

/// What a forward pass does to need less memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryOptions {
    /// What backward computes again, instead of forward keeping it.
    pub recompute: Recompute,
    /// Where the inputs of what is computed again wait for backward.
    pub keep: Keep,
    /// In how many tiles the MLP takes a rank's tokens, one after the other, forward and backward; 0 is as 1, all at once.
    pub mlp_tiles: usize,
    /// The parameters that ranks share out, of which a block is gathered at a time.
    pub shards: ParamShards,
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
    ///
    /// # Panics
    /// As [`RmsNorm::forward_residual`].
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
    ///
    /// # Panics
    /// As [`SelfAttention::forward`].
    #[track_caller]
    pub fn forward(&self, x: SpTensor<3>, context: &BlockContext) -> SpTensor<3> {
        self.forward_with(x, context, &MemoryOptions::default())
    }

    /// [`forward`](Self::forward), with less memory.
    ///
    /// # Shapes
    /// - as [`forward`](Self::forward)
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn forward_with(&self, x: SpTensor<3>, context: &BlockContext, memory: &MemoryOptions) -> SpTensor<3> {
        let (keep, tiles, own) = (memory.keep, memory.mlp_tiles, context.clone());
        if memory.recompute == Recompute::Blocks {
            let shards = memory.shards.clone();
            return checkpoint_with(keep, self, x, move |block: &Block, x| {
                let block = shards.gather(block);
                let heads = block.heads(x.clone(), &own);
                block.rest((x, heads), &own, tiles)
            });
        }
        let block = memory.shards.gather(self);
        let heads = match memory.recompute {
            Recompute::Attention => {
                let own = own.clone();
                checkpoint_with(keep, &block, x.clone(), move |block: &Block, x| block.heads(x, &own))
            }
            _ => block.heads(x.clone(), context),
        };
        match memory.recompute {
            Recompute::AllButAttention => checkpoint_with(keep, &block, (x, heads), move |block: &Block, streams| {
                block.rest(streams, &own, tiles)
            }),
            _ => block.rest((x, heads), context, tiles),
        }
    }

    /// [`forward`](Self::forward) of the tokens that come next, which see those before in a cache too; it takes up theirs.
    ///
    /// # Shapes
    /// - as [`forward`](Self::forward)
    ///
    /// # Panics
    /// As [`SelfAttention::attend_cached`].
    #[track_caller]
    pub fn forward_cached(
        &self,
        x: SpTensor<3>,
        context: &BlockContext,
        cache: &mut AttentionCache,
        memory: &MemoryOptions,
    ) -> SpTensor<3> {
        let block = memory.shards.gather(self);
        let (normed, rotary) = (x.clone().tokenwise(|x| block.norm1.forward(x)), context.rotary.as_ref());
        let heads = block.attention.attend_cached(normed, rotary, cache, &context.attention);
        // Of few tokens there is nothing to save, and a rank may have fewer than tiles.
        let tiles = memory
            .mlp_tiles
            .min(x.global_shape()[1] / x.mesh().shape().with_dp(1).ranks());
        block.rest((x, heads), context, tiles)
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
    fn rest(&self, (x, heads): (SpTensor<3>, SpTensor<3>), context: &BlockContext, mlp_tiles: usize) -> SpTensor<3> {
        let branch = self.attention.project(heads, x.layout().placement(Axis::Tp));
        let (x, normed) = self.norm2.forward_residual(x, branch, context.dropout, context.mask(0));
        let branch = self.mlp.forward_tiled(normed, mlp_tiles);
        x + context.dropout.forward(branch, context.mask(1))
    }

    /// This rank's part; see [`Transformer::shard`](super::Transformer::shard).
    ///
    /// # Panics
    /// If it has been sharded already.
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
