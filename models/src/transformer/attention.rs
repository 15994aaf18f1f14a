use burn::module::Module;
use burn::nn::Linear;
use burn_sp::attention::{AttentionCache, AttentionOptions, attention, cached_attention};
use burn_sp::layout::{Axis, Mesh, Placement, Split};
use burn_sp::nn::{Features, Gathered, RotaryTable, row_linear, shard_columns, shard_rows};
use burn_sp::train::ParamLayouts;
use burn_sp::{SpDevice, SpTensor};

/// Causal self-attention with any number of key/value heads (Vaswani et al., arXiv 1706.03762; grouped queries: Ainslie
/// et al., arXiv 2305.13245), which tensor parallelism may share out.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// Queries, `hidden -> heads * head_dim`.
    pub query: Linear,
    /// Keys, `hidden -> kv_heads * head_dim`.
    pub key: Linear,
    /// Values, `hidden -> kv_heads * head_dim`.
    pub value: Linear,
    /// Back to the residual stream, `heads * head_dim -> hidden`.
    pub output: Linear,
    /// Query heads, of all ranks.
    pub heads: usize,
    /// Key/value heads, of all ranks.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl SelfAttention {
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result
    ///
    /// # Panics
    /// If features of `x` are sharded, or as [`attention`].
    #[track_caller]
    pub fn forward(&self, x: SpTensor<3>, rotary: Option<&RotaryTable>, options: &AttentionOptions) -> SpTensor<3> {
        let tokens = x.layout().placement(Axis::Tp);
        self.project(self.attend(x, rotary, options), tokens)
    }

    /// The heads, before they are projected back to the residual stream.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`; returns `[batch, tokens, heads * head_dim]`
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn attend(&self, x: SpTensor<3>, rotary: Option<&RotaryTable>, options: &AttentionOptions) -> SpTensor<3> {
        let [q, k, v] = self.turned(x, rotary);
        self.head_features().merge_units(attention(q, k, v, options))
    }

    /// [`attend`](Self::attend), to the tokens before as well, of which a cache has the keys and values; it takes up those of
    /// these tokens. See [`cached_attention`].
    ///
    /// # Shapes
    /// - as [`attend`](Self::attend)
    ///
    /// # Panics
    /// As [`cached_attention`].
    #[track_caller]
    pub fn attend_cached(
        &self,
        x: SpTensor<3>,
        rotary: Option<&RotaryTable>,
        cache: &mut AttentionCache,
        options: &AttentionOptions,
    ) -> SpTensor<3> {
        let [q, k, v] = self.turned(x, rotary);
        self.head_features()
            .merge_units(cached_attention(q, k, v, cache, options))
    }

    /// Queries, keys and values, the first two turned to their positions.
    #[track_caller]
    fn turned(&self, x: SpTensor<3>, rotary: Option<&RotaryTable>) -> [SpTensor<4>; 3] {
        let (heads, kv_heads) = (self.head_features(), self.kv_features(x.mesh()));
        let x = Gathered::new(x);
        let project = |layer: &Linear, heads: Features, rotary: Option<&RotaryTable>| {
            let y = heads.split_units(x.linear(layer, heads));
            match rotary {
                Some(table) => y.tokenwise(|y| table.apply(y)),
                None => y,
            }
        };
        [
            project(&self.query, heads, rotary),
            project(&self.key, kv_heads, rotary),
            project(&self.value, kv_heads, None),
        ]
    }

    /// Heads back to the residual stream, with its tokens placed so over [`Axis::Tp`]; the other half of
    /// [`forward`](Self::forward).
    ///
    /// # Shapes
    /// - `heads`: `[batch, tokens, heads * head_dim]`; returns `[batch, tokens, hidden]`
    ///
    /// # Panics
    /// As [`row_linear`].
    #[track_caller]
    pub fn project(&self, heads: SpTensor<3>, tokens: Placement) -> SpTensor<3> {
        row_linear(heads, &self.output, tokens)
    }

    /// This rank's heads; see [`Transformer::shard`](super::Transformer::shard).
    ///
    /// # Panics
    /// If it has been sharded already.
    pub fn shard(self, device: &SpDevice, layouts: &mut ParamLayouts) -> Self {
        let (heads, kv_heads) = (self.head_features(), self.kv_features(device.mesh()));
        Self {
            query: shard_columns(self.query, heads, device, layouts),
            key: shard_columns(self.key, kv_heads, device, layouts),
            value: shard_columns(self.value, kv_heads, device, layouts),
            output: shard_rows(self.output, heads, device, layouts),
            ..self
        }
    }

    fn head_features(&self) -> Features {
        Features::sharded(self.heads, self.head_dim)
    }

    /// Key/value heads are shared out if that gives each rank those that its query heads read, and no two ranks the same;
    /// if not, every rank has all of them.
    fn kv_features(&self, mesh: &Mesh) -> Features {
        let ranks = mesh.size(Axis::Tp);
        let heads = Split::Contiguous.parts(self.heads, ranks);
        let kv_heads = Split::Contiguous.parts(self.kv_heads, ranks);
        let ratio = self.heads / self.kv_heads;
        let apart = (0..ranks).all(|rank| {
            let (q, kv) = (&heads.of(rank)[0], &kv_heads.of(rank)[0]);
            kv.start * ratio == q.start && kv.end * ratio == q.end
        });
        if apart {
            Features::sharded(self.kv_heads, self.head_dim)
        } else {
            Features::whole(self.kv_heads, self.head_dim)
        }
    }
}
