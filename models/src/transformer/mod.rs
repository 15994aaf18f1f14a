//! A decoder-only transformer whose tokens may be sharded.

mod attention;
mod block;
mod cache;
mod config;
mod generate;
mod hugging_face;
mod mlp;
mod model;
mod sampling;

pub use crate::import::ImportError;
pub use attention::SelfAttention;
pub use block::{Block, BlockContext, MemoryOptions, Norm, Recompute};
pub use cache::KvCache;
pub use config::{MlpKind, NormKind, PositionKind, TransformerConfig};
pub use generate::{GenerateOptions, Generated, generate};
pub use hugging_face::HuggingFace;
pub use mlp::Mlp;
pub use model::{ForwardOptions, Transformer, next_token_labels, tokens_and_labels};
pub use sampling::Sampling;
