//! Data: who reads which samples, what packed documents are on every layout, and that training on them is the same everywhere.

mod common;

mod data {
    mod packing;
    mod sampling;
    mod training;
}
