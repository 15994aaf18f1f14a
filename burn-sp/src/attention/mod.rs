//! Attention between tokens that ranks share. One entry; the layout and the mesh choose the strategy, and each strategy
//! is one file of the same form: `forward`, `backward`.

mod cached;
mod entry;
mod gather_kv;
mod local;
mod node;
mod pass_q;
mod ring;
mod strategy;
mod ulysses;

pub use cached::{AttentionCache, cached_attention};
pub use entry::{AttentionOptions, KvMove, attention};
pub use kernels_cubecl::{Blocks, Documents, Mask, MaskRule, Positions, RotaryStyle, Tile};
pub(crate) use node::autodiff;
pub use strategy::AttentionCall;
pub(crate) use strategy::cast;
