use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_sp::attention::{AttentionOptions, KvMove, Mask, attention};
use burn_sp::kernels::accumulation;
use burn_sp::layout::{Axis, Placement};
use burn_sp::nn::{Features, Gathered, RmsNorm, row_linear, shard_columns, shard_norm, shard_rows};
use burn_sp::train::ParamLayouts;
use burn_sp::{SpDevice, SpTensor};

use super::{LayerCache, VideoRotary};

/// The dimension of the heads in `[batch, tokens, heads, head_dim]`.
const HEADS: usize = 2;

/// Attention whose queries and keys are normed over their *whole* width, before they are heads: of the video to itself, or
/// of the video to a text. Tensor parallelism may share out its heads.
#[derive(Module, Debug)]
pub struct VideoAttention {
    /// Queries, `hidden -> hidden`.
    pub query: Linear,
    /// Keys, `hidden -> hidden`.
    pub key: Linear,
    /// Values, `hidden -> hidden`.
    pub value: Linear,
    /// Norm of the queries.
    pub query_norm: RmsNorm,
    /// Norm of the keys.
    pub key_norm: RmsNorm,
    /// Back to the residual stream, `hidden -> hidden`.
    pub output: Linear,
    /// Heads, of all ranks.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl VideoAttention {
    /// The heads of attention of the video to itself, before [`row_linear`] with the output layer.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result
    ///
    /// # Panics
    /// If features of `x` are sharded, its tokens are not those of the table, or as [`attention`].
    #[track_caller]
    pub fn attend(&self, x: SpTensor<3>, rotary: &VideoRotary, options: &AttentionOptions) -> SpTensor<3> {
        let [q, k, v] = self.turned(x, rotary);
        self.features().merge_units(attention(q, k, v, options))
    }

    /// [`attend`](Self::attend), to a cache as well, which takes up the keys and values of these tokens.
    ///
    /// The ranks of `ulysses` share out the heads of the cache, those of `ring` its tokens: what was computed once is not
    /// sent again by the one, and travels around the other as in training.
    ///
    /// # Shapes
    /// - as [`attend`](Self::attend)
    ///
    /// # Panics
    /// As [`attend`](Self::attend).
    #[track_caller]
    pub fn attend_cached(
        &self,
        x: SpTensor<3>,
        rotary: &VideoRotary,
        cache: &mut LayerCache,
        kv: KvMove,
    ) -> SpTensor<3> {
        let [q, k, v] = self.turned(x, rotary);
        // In one message.
        let packed = q.tokenwise(|q| Tensor::cat(vec![q, k.into_local(), v.into_local()], 3));
        let packed = packed.redistribute(Axis::Ulysses, Placement::Shard(HEADS));
        let part = |index: usize| {
            let of = |packed: Tensor<4>| packed.narrow(3, index * self.head_dim, self.head_dim);
            packed.clone().tokenwise(of)
        };
        let (k, v) = cache.extend(part(1), part(2));
        let options = AttentionOptions {
            mask: Mask::Full,
            kv,
            ..AttentionOptions::default()
        };
        let heads = attention(part(0), k, v, &options);
        self.features()
            .merge_units(heads.redistribute(Axis::Ulysses, Placement::Shard(1)))
    }

    /// Attention of the video to a text that every rank has whole, under a mask over their positions.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result; `text`: `[batch, text tokens, hidden]`
    ///
    /// # Panics
    /// If features are sharded, or as [`attention`].
    #[track_caller]
    pub fn forward_text(&self, x: SpTensor<3>, text: SpTensor<3>, mask: &Mask) -> SpTensor<3> {
        let q = self.queries(&Gathered::new(x));
        let (k, v) = {
            let text = Gathered::new(text);
            (self.keys(&text), self.values(&text))
        };
        let options = AttentionOptions {
            mask: mask.clone(),
            ..AttentionOptions::default()
        };
        let heads = self.features().merge_units(attention(q, k, v, &options));
        row_linear(heads, &self.output, Placement::Shard(1))
    }

    /// This rank's heads; see [`VideoDit::shard`](super::VideoDit::shard).
    ///
    /// # Panics
    /// If it has been sharded already.
    pub fn shard(self, device: &SpDevice, layouts: &mut ParamLayouts) -> Self {
        let heads = self.features();
        Self {
            query: shard_columns(self.query, heads, device, layouts),
            key: shard_columns(self.key, heads, device, layouts),
            value: shard_columns(self.value, heads, device, layouts),
            output: shard_rows(self.output, heads, device, layouts),
            query_norm: shard_norm(self.query_norm, heads, device, layouts),
            key_norm: shard_norm(self.key_norm, heads, device, layouts),
            ..self
        }
    }

    /// Queries, keys and values, the first two turned to their positions.
    fn turned(&self, x: SpTensor<3>, rotary: &VideoRotary) -> [SpTensor<4>; 3] {
        let x = Gathered::new(x);
        let turn = |x: SpTensor<4>| x.tokenwise(|x| rotary.apply(x));
        [turn(self.queries(&x)), turn(self.keys(&x)), self.values(&x)]
    }

    fn features(&self) -> Features {
        Features::sharded(self.heads, self.head_dim)
    }

    fn queries(&self, x: &Gathered) -> SpTensor<4> {
        let q = x.linear(&self.query, self.features());
        self.features().split_units(norm(&self.query_norm, q, self.features()))
    }

    fn keys(&self, x: &Gathered) -> SpTensor<4> {
        let k = x.linear(&self.key, self.features());
        self.features().split_units(norm(&self.key_norm, k, self.features()))
    }

    fn values(&self, x: &Gathered) -> SpTensor<4> {
        let v = x.linear(&self.value, self.features());
        self.features().split_units(v)
    }
}

/// The norm of all features, of which tensor parallelism may have shared out the input's and the weight's: then ranks add
/// up their sums of squares.
#[track_caller]
fn norm(norm: &RmsNorm, x: SpTensor<3>, features: Features) -> SpTensor<3> {
    if !features.is_split(x.mesh()) {
        return x.tokenwise(|x| norm.forward(x));
    }
    let dtype = x.local().dtype();
    let wide = accumulation(dtype);
    let x = x.tokenwise(|x| x.cast(wide));
    let squares = x.clone().mul(x.clone()).sum_dim(2);
    // Every rank uses the inverse for other features: its gradient is partial, and this node's backward adds it up.
    let inverse = squares.redistribute(Axis::Tp, Placement::Replicate).tokenwise(|sum| {
        // Not a division: Burn computes the gradient of one in f32.
        let mean = sum.mul_scalar(1.0 / features.count() as f64);
        mean.add_scalar(norm.epsilon).sqrt().recip()
    });
    let gamma = norm.gamma.val();
    let [own] = gamma.dims();
    // Not unsqueeze, which fails on no features.
    let gamma = gamma.reshape([own, 1, 1]).swap_dims(0, 2);
    x.tokenwise(|x| (x * inverse.into_local()).cast(dtype) * gamma)
}
