//! Videos as they lie on disk, in host memory: footage, the windows of it that a step sees, captions, and clips written.
//!
//! No tensors here: a picture is bytes. Sizes are `[height, width]` in pixels.

mod captions;
mod dataset;
mod ffmpeg;
mod footage;
mod picture;
mod pictures;
mod scene;
mod write;
mod y4m;

pub use captions::{Captions, embed};
pub use dataset::{Clip, Dataset, Sampler, Window};
pub use footage::Footage;
pub use picture::Picture;
pub use write::{contact_sheet, write_video};

use std::fmt::Display;
use std::path::Path;

use crate::InputError;

/// What is wrong with a file or a folder.
fn wrong(path: &Path, error: impl Display) -> InputError {
    InputError(format!("video {}: {error}", path.display()))
}

/// What a file's name ends in, in lower case.
fn extension(path: &Path) -> String {
    let extension = path.extension().unwrap_or_default();
    extension.to_string_lossy().to_lowercase()
}
