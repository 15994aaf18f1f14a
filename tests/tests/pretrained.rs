//! Checkpoints of Hugging Face's transformers: what they compute, what is saved, on any mesh, and what is refused.

mod common;
mod pretrained {
    mod anywhere;
    mod bytes;
    mod checkpoint;
    mod folders;
    mod kills;
    mod pytorch;
    mod refusals;
    mod settings;
}

use std::fs;
use std::path::{Path, PathBuf};

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pretrained").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}
