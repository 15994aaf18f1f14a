use burn::nn::Linear;
use burn::nn::attention::MultiHeadAttention;

use crate::SpTensor;
use crate::attention::{AttentionOptions, attention};
use crate::tensor::Refusal;

const OP: &str = "multi_head_attention";

/// Self-attention by Burn's own [`MultiHeadAttention`], over tokens that ranks share out: its parameters, our
/// [`attention`]. So a model keeps its modules and its records.
///
/// The mask is a rule over global positions, in place of `MhaInput::mask_attn`. Weights are dropped with the module's
/// probability (that of the options is not read) where the options name a mask by
/// [`dropout_key`](AttentionOptions::dropout_key).
///
/// # Shapes
/// - `x`: `[batch, tokens, d_model]`, and so is the result, in the layout of `x`
///
/// # Panics
/// If the module has quiet softmax, or drops weights in training and the options name no mask: without a name every mesh
/// would drop others.
///
/// # Example
/// ```
/// use burn::nn::attention::MultiHeadAttentionConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::{nn::multi_head_attention, prelude::*};
///
/// let module = MultiHeadAttentionConfig::new(8, 2).init(&Device::flex());
/// let config = LaunchConfig::new(MeshShape::ring(3));
/// launch_module(&config, &Device::flex(), module, |device, module| {
///     let x = Tensor::<3>::ones([1, 7, 8], device.device());
///     let x = device.distribute(x, &device.sequence_layout([1, 7, 8]));
///     let y = multi_head_attention(&module, x, &Mask::Causal.into());
///     assert_eq!(y.global_shape(), [1, 7, 8]);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[track_caller]
pub fn multi_head_attention(module: &MultiHeadAttention, x: SpTensor<3>, options: &AttentionOptions) -> SpTensor<3> {
    if module.quiet_softmax {
        Refusal::new(OP, "the module has quiet softmax", "make it without").refuse();
    }
    let drops = module.dropout.prob > 0.0;
    if drops && x.local().device().is_autodiff() && options.dropout_key.is_none() {
        Refusal::new(
            OP,
            format!("the module drops weights with probability {}", module.dropout.prob),
            "name the mask by AttentionOptions::dropout_key (seed, step, layer), so that it is the same on every mesh, or \
             make the module with_dropout(0.0)",
        )
        .refuse();
    }
    let heads = |layer: &Linear| {
        x.clone().tokenwise(|x| {
            let [batch, tokens, _] = x.dims();
            // Not -1: that finds no width where a rank has no token.
            layer.forward(x).reshape([batch, tokens, module.n_heads, module.d_k])
        })
    };
    let (q, k, v) = (heads(&module.query), heads(&module.key), heads(&module.value));
    let options = AttentionOptions {
        dropout: module.dropout.prob,
        ..options.clone()
    };
    attention(q, k, v, &options).tokenwise(|y| {
        let [batch, tokens, heads, width] = y.dims();
        module.output.forward(y.reshape([batch, tokens, heads * width]))
    })
}
