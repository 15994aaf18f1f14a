//! Tensor parallelism with sequence parallelism: the fused layers against the table of layout changes, their traffic, the
//! vocabulary in parts, and whole models on meshes with a `tp` axis.

mod common;
mod megatron {
    mod layers;
    mod loss;
    mod models;
    mod refusals;
}
