//! Training state: what is saved, on which mesh it goes on, and what is refused.

mod common;
mod state {
    mod model;
    mod modules;
    mod refusals;
    mod resume;
}

use std::fs;
use std::path::{Path, PathBuf};

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("state").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}
