use burn::module::Module;
use burn::nn::Linear;
use burn_sp::attention::{AttentionOptions, attention};
use burn_sp::layout::{Axis, Mesh, Placement, Split};
use burn_sp::nn::{Features, Gathered, RotaryTable, row_linear, shard_columns, shard_rows};
use burn_sp::train::ParamLayouts;
use burn_sp::{SpDevice, SpTensor};

/// Causal self-attention with any number of key/value heads, which tensor parallelism may share out.
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
    #[track_caller]
    pub fn forward(&self, x: SpTensor<3>, rotary: Option<&RotaryTable>, options: &AttentionOptions) -> SpTensor<3> {
        self.project(self.attend(x, rotary, options))
    }

    /// The heads, before they are projected back to the residual stream.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`; returns `[batch, tokens, heads * head_dim]`
    #[track_caller]
    pub fn attend(&self, x: SpTensor<3>, rotary: Option<&RotaryTable>, options: &AttentionOptions) -> SpTensor<3> {
        let (heads, kv_heads) = (self.head_features(), self.kv_features(x.mesh()));
        let (q, k, v) = {
            let x = Gathered::new(x);
            let project = |layer: &Linear, heads: Features, rotary: Option<&RotaryTable>| {
                let y = heads.split_units(x.linear(layer, heads));
                match rotary {
                    Some(table) => y.tokenwise(|y| table.apply(y)),
                    None => y,
                }
            };
            (
                project(&self.query, heads, rotary),
                project(&self.key, kv_heads, rotary),
                project(&self.value, kv_heads, None),
            )
        };
        heads.merge_units(attention(q, k, v, options))
    }

    /// Heads back to the residual stream; the other half of [`forward`](Self::forward).
    ///
    /// # Shapes
    /// - `heads`: `[batch, tokens, heads * head_dim]`; returns `[batch, tokens, hidden]`
    #[track_caller]
    pub fn project(&self, heads: SpTensor<3>) -> SpTensor<3> {
        row_linear(heads, &self.output, Placement::Shard(1))
    }

    /// This rank's heads; see [`Transformer::shard`](super::Transformer::shard).
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
