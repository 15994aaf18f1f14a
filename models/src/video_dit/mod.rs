//! A causal video diffusion transformer (Wan 2.1 and 2.2: Wan Team, "Wan: Open and Advanced Large-Scale Video Generative
//! Models", arXiv 2503.20314) whose tokens may be sharded.
//!
//! A video is one sequence of tokens, one a patch, frame after frame. Ranks share out tokens, not frames: any number of
//! frames works on any number of ranks. A token's frame, row and column follow from its *global* position.

mod attention;
mod block;
mod cache;
mod config;
mod embedding;
mod flow;
mod frames;
mod grid;
mod import;
mod input;
mod mask;
mod model;
mod noise;
mod objective;
mod partition;
mod prompts;
mod rotary;
mod sampler;

pub use attention::VideoAttention;
pub use block::{VideoBlock, VideoContext};
pub use cache::{LayerCache, VideoCache};
pub use config::VideoDitConfig;
pub use embedding::{TextEmbedding, TimeEmbedding};
pub use flow::{FlowSchedule, FlowSolver, Solver};
pub use frames::FrameRuns;
pub use grid::{VideoGrid, from_output_patches, input_patches, output_patches};
pub use import::{ImportError, Naming};
pub use input::VideoInput;
pub use mask::{FrameBlocks, VideoMask};
pub use model::{VideoDit, VideoHead, VideoOptions};
pub use noise::VideoKey;
pub use objective::{Forcing, VideoObjective, VideoSample};
pub use partition::{VideoBatch, VideoPartition};
pub use rotary::VideoRotary;
pub use sampler::{VideoSampler, VideoSamplerConfig};
