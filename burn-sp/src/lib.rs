#![doc = include_str!("../README.md")]

pub mod attention;
pub mod data;
mod engine;
mod error;
mod launch;
pub mod layout;
#[cfg(feature = "learner")]
pub mod learner;
pub mod nn;
mod one_model;
mod tensor;
pub mod train;

pub use burn_sp_comm as comm;
pub use engine::Engine;
pub use error::Error;
pub use kernels_cubecl as kernels;
pub use launch::{LaunchConfig, RankDevices, initialize, launch, launch_module};
pub use tensor::{Refusal, SpBackend, SpDevice, SpKind, SpOps, SpTensor, WindowPart, seeded};

/// What most programs need.
pub mod prelude {
    pub use crate::attention::{AttentionOptions, KvMove, Mask, attention};
    pub use crate::layout::{Axis, Layout, Mesh, MeshShape, Placement, Split};
    pub use crate::nn::multi_head_attention;
    pub use crate::train::{
        LossShare, ParamLayouts, clip_by_global_norm, cross_entropy, sum_gradients, token_loss, valid_tokens,
    };
    pub use crate::{Engine, LaunchConfig, SpDevice, SpTensor, launch, launch_module};
}
