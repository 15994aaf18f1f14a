use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_sp::SpTensor;
use burn_sp::attention::{Mask, Positions};
use burn_sp::kernels::{AttentionSpec, HeadMap, attention};
use burn_sp::layout::{Axis, Placement};
use burn_sp::nn::{RmsNorm, RmsNormConfig};
use burn_sp::train::LossShare;

const BATCH: usize = 0;
const FRAMES: usize = 1;
const PIXELS: usize = 2;
const HIDDEN: usize = 3;

/// Configuration of [`SpatialTemporalModel`].
#[derive(Config, Debug)]
pub struct SpatialTemporalModelConfig {
    /// Elements of a token.
    pub hidden: usize,
    /// Heads of either attention; a divisor of `hidden`.
    pub heads: usize,
    /// Blocks.
    #[config(default = 1)]
    pub layers: usize,
}

impl SpatialTemporalModelConfig {
    /// A model with Burn's default weights.
    pub fn init(&self, device: &Device) -> SpatialTemporalModel {
        let block = |_| SpatialTemporalBlock {
            spatial: self.attention(device),
            temporal: self.attention(device),
        };
        SpatialTemporalModel {
            blocks: (0..self.layers).map(block).collect(),
        }
    }

    fn attention(&self, device: &Device) -> LocalAttention {
        let linear = LinearConfig::new(self.hidden, self.hidden);
        LocalAttention {
            norm: RmsNormConfig::new(self.hidden).init(device),
            query: linear.init(device),
            // A bias would add the same to all scores of a query, which softmax takes off again.
            key: linear.clone().with_bias(false).init(device),
            value: linear.init(device),
            output: linear.init(device),
            heads: self.heads,
        }
    }
}

/// Attention between tokens that are all on this rank, with its norm and its residual. It knows nothing of ranks.
#[derive(Module, Debug)]
pub struct LocalAttention {
    /// Before queries, keys and values.
    pub norm: RmsNorm,
    /// Queries, `hidden -> hidden`.
    pub query: Linear,
    /// Keys, `hidden -> hidden`.
    pub key: Linear,
    /// Values, `hidden -> hidden`.
    pub value: Linear,
    /// Back to the residual stream, `hidden -> hidden`.
    pub output: Linear,
    /// How many heads share `hidden`.
    pub heads: usize,
}

impl LocalAttention {
    /// # Shapes
    /// - `x`: `[sequences, more sequences, tokens, hidden]`, and so is the result; the first dimension may be empty
    pub fn forward(&self, x: Tensor<4>, mask: Mask) -> Tensor<4> {
        let shape @ [a, b, tokens, hidden] = x.dims();
        let head_dim = hidden / self.heads;
        // Burn multiplies no batch of size 0, but a matrix of no rows.
        let rows = x.clone().reshape([a * b * tokens, hidden]);
        let rows = self.norm.forward(rows);
        let heads = |linear: &Linear| {
            let y = linear.forward(rows.clone());
            y.reshape([a * b, tokens, self.heads, head_dim])
        };
        let (q, k, v) = (heads(&self.query), heads(&self.key), heads(&self.value));
        let spec = AttentionSpec {
            mask,
            q_positions: Positions::whole(tokens),
            k_positions: Positions::whole(tokens),
            scale: 1.0 / (head_dim as f64).sqrt(),
            heads: HeadMap::new(self.heads, self.heads),
            dropout: None,
            wide: false,
        };
        let (y, _) = attention(q, k, v, spec);
        x + self.output.forward(y.reshape([a * b * tokens, hidden])).reshape(shape)
    }
}

/// Attention over the pixels of each frame, then over the frames of each pixel.
///
/// Ranks hold whole frames for the first and whole pixels for the second, so neither attention communicates. Between the
/// two the tokens change hands once, `2 (s h / P) (P - 1) / P` elements for there and back, in two all-to-all forward and
/// two backward. Exchanging tokens for heads around each attention would take `8 (s h / P) (P - 1) / P` elements (q, k, v
/// and the output, of two attentions), in four all-to-all forward and four backward, as q, k and v travel in one.
#[derive(Module, Debug)]
pub struct SpatialTemporalBlock {
    /// Between the pixels of a frame; every pixel sees every other.
    pub spatial: LocalAttention,
    /// Between the frames of a pixel; a frame sees itself and those before.
    pub temporal: LocalAttention,
}

impl SpatialTemporalBlock {
    /// # Shapes
    /// - `x`: `[batch, frames, pixels, hidden]`, pixels whole on every rank; so is the result
    ///
    /// # Panics
    /// If pixels are sharded, or frames over another axis than ulysses: an attention would miss tokens.
    #[track_caller]
    pub fn forward(&self, x: SpTensor<4>) -> SpTensor<4> {
        whole(&x, PIXELS);
        let x = x.tokenwise(|x| {
            // Frames, of which a rank may have none, come first: elsewhere Burn's `reshape` takes a length of 0 for "as
            // it was".
            let frames = x.permute([FRAMES, BATCH, PIXELS, HIDDEN]);
            self.spatial.forward(frames, Mask::Full).permute([1, 0, 2, 3])
        });

        let x = x.redistribute(Axis::Ulysses, Placement::Shard(PIXELS));
        whole(&x, FRAMES);
        let x = x.tokenwise(|x| {
            let pixels = x.permute([PIXELS, BATCH, FRAMES, HIDDEN]);
            self.temporal.forward(pixels, Mask::Causal).permute([1, 2, 0, 3])
        });
        x.redistribute(Axis::Ulysses, Placement::Shard(FRAMES))
    }
}

#[track_caller]
fn whole(x: &SpTensor<4>, dim: usize) {
    assert!(
        x.layout().shards(dim).is_empty(),
        "spatial/temporal block: dimension {dim} of {} must be whole; shard frames over Ulysses and nothing else",
        x.layout()
    );
}

/// A stack of [`SpatialTemporalBlock`]s that predicts the next frame from those before.
#[derive(Module, Debug)]
pub struct SpatialTemporalModel {
    /// The blocks.
    pub blocks: Vec<SpatialTemporalBlock>,
}

impl SpatialTemporalModel {
    /// # Shapes
    /// - `frames`: `[batch, frames, pixels, hidden]`, frames sharded over ulysses; so is the result
    #[track_caller]
    pub fn forward(&self, frames: SpTensor<4>) -> SpTensor<4> {
        self.blocks.iter().enumerate().fold(frames, |x, (index, block)| {
            let _span = tracing::trace_span!("block", number = index).entered();
            block.forward(x)
        })
    }

    /// This rank's share of the mean squared error of the prediction.
    ///
    /// # Shapes
    /// - `frames`, `next`: `[batch, frames, pixels, hidden]` in one layout
    #[track_caller]
    pub fn loss(&self, frames: SpTensor<4>, next: SpTensor<4>) -> LossShare {
        let error = self.forward(frames) - next;
        LossShare::mean(error.clone() * error)
    }
}
