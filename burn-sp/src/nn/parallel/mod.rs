//! Tensor parallelism (Megatron-LM, arXiv 1909.08053) with sequence parallelism (arXiv 2205.05198) over [`Axis::Tp`]:
//! ranks hold slices of the weights, and between the layers slices of the tokens.
//!
//! [`Axis::Tp`]: crate::layout::Axis::Tp

mod embedding;
mod features;
mod input;
mod linear;
mod node;
mod shard;

pub use embedding::parallel_embedding;
pub use features::Features;
pub use input::ColumnInput;
pub(crate) use input::gather_input_autodiff;
pub use linear::{Gathered, row_linear};
pub(crate) use node::{multiply, parallel_linear_autodiff};
pub use shard::{shard_columns, shard_entries, shard_norm, shard_rows};
