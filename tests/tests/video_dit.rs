//! The video transformer: the numbers of diffusers' for Wan, its checkpoints, its masks, its training and sampling, and tiny random models on many
//! ranks against one.

mod common;
mod video_dit {
    mod fixtures;
    mod flow;
    mod import;
    mod masks;
    mod memory;
    mod partition;
    mod ranks;
    mod sampling;
    mod tiny;
    mod together;
    mod traffic;
    mod training;
}
