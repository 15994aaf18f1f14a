//! What a training step needs beside the model: the loss as a share, gradients summed over the right axes, clipping by
//! the global norm, the optimizer's and the parameters' shares, and a state that is saved and continued.

mod checkpoint;
mod clip;
mod gradients;
mod loss;
mod params;
mod sharded;
mod shards;
mod state;
mod token_loss;

pub use checkpoint::{Carried, Keep, checkpoint, checkpoint_with, tiled};
pub use clip::clip_by_global_norm;
pub use gradients::sum_gradients;
pub use loss::{LossShare, valid_tokens};
pub use params::ParamLayouts;
pub use sharded::ShardedOptimizer;
pub use shards::{ParamShards, shard_parameters};
pub use state::{SavedState, StateError, StateInfo, StateStore, StatefulOptimizer, saved_states, whole_module};
pub(crate) use token_loss::token_loss_autodiff;
pub use token_loss::{TokenLossSpec, class_parallel_loss, cross_entropy, token_loss};
