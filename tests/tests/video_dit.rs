//! The video transformer: the numbers of diffusers' for Wan, its checkpoints, its masks, and tiny random models on many
//! ranks against one.

mod common;
mod video_dit {
    mod fixtures;
    mod import;
    mod masks;
    mod memory;
    mod partition;
    mod ranks;
    mod tiny;
}
