use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_sp::attention::{AttentionOptions, Mask};
use burn_sp::layout::Placement;
use burn_sp::nn::{Dropout, LayerNorm, row_linear};
use burn_sp::train::{ParamLayouts, checkpoint_with};
use burn_sp::{SpDevice, SpTensor};

use super::{FrameRuns, LayerCache, VideoAttention, VideoRotary};
use crate::transformer::{MemoryOptions, Mlp, Recompute};

/// Self-attention and MLP, each modulated by the time of the token's frame (DiT: Peebles and Xie, arXiv 2212.09748),
/// and between them attention to the text.
#[derive(Module, Debug)]
pub struct VideoBlock {
    /// Added to the vectors that all blocks share, `[1, 6, hidden]`: shift, scale and gate of attention, then of the MLP.
    pub modulation: Param<Tensor<3>>,
    /// Attention of the video to itself.
    pub attention: VideoAttention,
    /// Norm before attention to the text.
    pub text_norm: LayerNorm,
    /// Attention of the video to the text.
    pub text_attention: VideoAttention,
    /// MLP.
    pub mlp: Mlp,
    /// Added under the roots of the norms that have no parameters.
    pub epsilon: f64,
}

/// What all blocks depend on beside the residual stream, and what has no gradient.
#[derive(Clone, Debug)]
pub struct VideoContext {
    /// The frames of the residual stream's tokens.
    pub frames: FrameRuns,
    /// Rotary positions of the tokens of attention.
    pub rotary: VideoRotary,
    /// Mask of self-attention.
    pub attention: AttentionOptions,
    /// Mask of attention to the text.
    pub text: Mask,
}

/// Parts of a block that run behind the heads of self-attention: its output layer and all the rest.
type Rest = (Linear, LayerNorm, VideoAttention, Mlp);

impl VideoBlock {
    /// `vectors` are of this rank's frames, and so no tensor with a layout: a frame that two ranks share has a copy on each.
    /// Each rank computes them from the replicated times and parameters for its own tokens alone, so the gradients that
    /// reach those parameters are terms of a sum, which is how the gradient of what is replicated should be. The same holds
    /// for `text`.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result
    /// - `vectors`: `[batch, frames, 6, hidden]`, frames those of [`FrameRuns::frames`]
    /// - `text`: `[batch, text tokens, hidden]`
    ///
    /// # Panics
    /// As [`VideoAttention::attend`].
    #[track_caller]
    pub fn forward(
        &self,
        x: SpTensor<3>,
        vectors: Tensor<4>,
        text: SpTensor<3>,
        context: &VideoContext,
        memory: &MemoryOptions,
    ) -> SpTensor<3> {
        let (keep, tiles, epsilon, own) = (memory.keep, memory.mlp_tiles, self.epsilon, context.clone());
        if memory.recompute == Recompute::Blocks {
            let shards = memory.shards.clone();
            let streams = (x, vectors, text);
            return checkpoint_with(keep, self, streams, move |block: &Self, (x, vectors, text)| {
                let block = shards.gather(block);
                let vectors = block.vectors(vectors);
                let heads = heads(&block.attention, x.clone(), vectors.clone(), epsilon, &own);
                rest(&block.rest(), (x, heads, vectors, text), epsilon, &own, tiles)
            });
        }
        let block = memory.shards.gather(self);
        let vectors = block.vectors(vectors);
        let heads = match memory.recompute {
            Recompute::Attention => {
                let (own, streams) = (own.clone(), (x.clone(), vectors.clone()));
                checkpoint_with(keep, &block.attention, streams, move |attention, (x, vectors)| {
                    heads(attention, x, vectors, epsilon, &own)
                })
            }
            _ => heads(&block.attention, x.clone(), vectors.clone(), epsilon, context),
        };
        let (parts, streams) = (block.rest(), (x, heads, vectors, text));
        match memory.recompute {
            Recompute::AllButAttention => checkpoint_with(keep, &parts, streams, move |parts, streams| {
                rest(parts, streams, epsilon, &own, tiles)
            }),
            _ => rest(&parts, streams, epsilon, context, tiles),
        }
    }

    /// [`forward`](Self::forward) of tokens that see a cache and one another; the context's mask of self-attention is not
    /// asked. Nothing of it is computed again.
    ///
    /// # Shapes
    /// - as [`forward`](Self::forward)
    ///
    /// # Panics
    /// As [`VideoAttention::attend`].
    #[track_caller]
    pub fn forward_cached(
        &self,
        x: SpTensor<3>,
        vectors: Tensor<4>,
        text: SpTensor<3>,
        context: &VideoContext,
        cache: &mut LayerCache,
    ) -> SpTensor<3> {
        let vectors = self.vectors(vectors);
        let normed = x
            .clone()
            .tokenwise(|x| modulated(x, &vectors, 0, self.epsilon, &context.frames));
        let heads = self
            .attention
            .attend_cached(normed, &context.rotary, cache, context.attention.kv);
        rest(&self.rest(), (x, heads, vectors, text), self.epsilon, context, 1)
    }

    /// This rank's part; see [`VideoDit::shard`](super::VideoDit::shard).
    ///
    /// # Panics
    /// If it has been sharded already.
    pub fn shard(self, device: &SpDevice, layouts: &mut ParamLayouts) -> Self {
        Self {
            attention: self.attention.shard(device, layouts),
            text_attention: self.text_attention.shard(device, layouts),
            mlp: self.mlp.shard(device, layouts),
            ..self
        }
    }

    /// The block's vectors, of those that all blocks share.
    fn vectors(&self, shared: Tensor<4>) -> Tensor<4> {
        shared + self.modulation.val().unsqueeze_dim(1)
    }

    fn rest(&self) -> Rest {
        (
            self.attention.output.clone(),
            self.text_norm.clone(),
            self.text_attention.clone(),
            self.mlp.clone(),
        )
    }
}

/// Up to the heads of self-attention.
fn heads(
    attention: &VideoAttention,
    x: SpTensor<3>,
    vectors: Tensor<4>,
    epsilon: f64,
    context: &VideoContext,
) -> SpTensor<3> {
    let x = x.tokenwise(|x| modulated(x, &vectors, 0, epsilon, &context.frames));
    attention.attend(x, &context.rotary, &context.attention)
}

/// From the residual stream and the heads of self-attention to the end of the block.
fn rest(
    (output, text_norm, text_attention, mlp): &Rest,
    (x, heads, vectors, text): (SpTensor<3>, SpTensor<3>, Tensor<4>, SpTensor<3>),
    epsilon: f64,
    context: &VideoContext,
    mlp_tiles: usize,
) -> SpTensor<3> {
    let frames = &context.frames;
    let gated = |branch: SpTensor<3>, gate: usize| branch.tokenwise(|y| frames.gate(y, vector(&vectors, gate)));
    let branch = gated(row_linear(heads, output, Placement::Shard(1)), 2);
    let (x, normed) = text_norm.forward_residual(x, branch, Dropout { probability: 0.0 }, None);
    let x = x + text_attention.forward_text(normed, text, &context.text);
    let normed = x.clone().tokenwise(|x| modulated(x, &vectors, 3, epsilon, frames));
    x + gated(mlp.forward_tiled(normed, mlp_tiles), 5)
}

/// The norm without parameters, modulated by two vectors of each token's frame: the shift at an index, and behind it the
/// scale.
///
/// # Shapes
/// - `x`: `[batch, tokens, hidden]`; `vectors`: `[batch, frames, vectors, hidden]`
pub(super) fn modulated(
    x: Tensor<3>,
    vectors: &Tensor<4>,
    shift: usize,
    epsilon: f64,
    frames: &FrameRuns,
) -> Tensor<3> {
    let [.., features] = x.dims();
    let options = (&x.device(), x.dtype());
    let normed = kernels_cubecl::layer_norm(
        x,
        Tensor::ones([features], options),
        Tensor::zeros([features], options),
        epsilon,
    );
    frames.modulate(normed, vector(vectors, shift), vector(vectors, shift + 1))
}

fn vector(vectors: &Tensor<4>, index: usize) -> Tensor<4> {
    vectors.clone().narrow(2, index, 1)
}
