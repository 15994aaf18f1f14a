//! Generation with a cache of keys and values that ranks share: what a whole pass computes, token by token, on every mesh.

mod common;
mod generation {
    mod fixtures;
    mod logits;
    mod refusals;
    mod sampling;
    mod share;
    mod text;
    mod tiny;
}
