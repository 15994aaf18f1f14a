//! Modules that Burn lacks or that keep too much: norms on the fused kernels, rotary embedding at global positions,
//! dropout whose mask does not depend on the layout, tensor-parallel linear layers and embeddings. And Burn's own multi-head
//! attention, over tokens that ranks share out.

mod dropout;
mod multi_head;
mod norm;
mod parallel;
mod rotary;

pub use dropout::{Dropout, DropoutKey};
pub use multi_head::multi_head_attention;
pub use norm::{LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig};
pub use parallel::{
    ColumnInput, Features, Gathered, parallel_embedding, row_linear, shard_columns, shard_entries, shard_norm,
    shard_rows,
};
pub(crate) use parallel::{gather_input_autodiff, multiply, parallel_linear_autodiff};
pub use rotary::{Rotary, RotaryScaling, RotaryTable};
