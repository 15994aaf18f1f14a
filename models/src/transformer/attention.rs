use burn::module::Module;
use burn::nn::Linear;
use burn_sp::SpTensor;
use burn_sp::attention::{AttentionOptions, attention};
use burn_sp::nn::RotaryTable;

/// Causal self-attention with any number of key/value heads.
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
    /// Elements of a head.
    pub head_dim: usize,
}

impl SelfAttention {
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result
    #[track_caller]
    pub fn forward(&self, x: SpTensor<3>, rotary: Option<&RotaryTable>, options: &AttentionOptions) -> SpTensor<3> {
        let heads = |linear: &Linear, rotary: Option<&RotaryTable>| {
            x.clone().tokenwise(|x| {
                let [batch, tokens, _] = x.dims();
                let y = linear.forward(x);
                let heads = y.dims()[2] / self.head_dim;
                let y = y.reshape([batch, tokens, heads, self.head_dim]);
                match rotary {
                    Some(table) => table.apply(y),
                    None => y,
                }
            })
        };
        let (q, k, v) = (
            heads(&self.query, rotary),
            heads(&self.key, rotary),
            heads(&self.value, None),
        );
        attention(q, k, v, options).tokenwise(|y| {
            let [batch, tokens, heads, head_dim] = y.dims();
            self.output.forward(y.reshape([batch, tokens, heads * head_dim]))
        })
    }
}
