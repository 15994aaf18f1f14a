//! A decoder-only transformer whose tokens may be sharded.

mod attention;
mod block;
mod config;
mod mlp;
mod model;

pub use attention::SelfAttention;
pub use block::{Block, BlockContext, MemoryOptions, Norm, Recompute};
pub use config::{MlpKind, NormKind, PositionKind, TransformerConfig};
pub use mlp::Mlp;
pub use model::{ForwardOptions, Transformer, next_token_labels, tokens_and_labels};
