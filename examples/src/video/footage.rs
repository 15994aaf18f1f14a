use std::fmt::Debug;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::ffmpeg::Ffmpeg;
use super::pictures::Pictures;
use super::scene::Scene;
use super::y4m::Y4m;
use super::{Picture, extension, wrong};
use crate::InputError;

/// The frames of a clip, read when they are wanted: from Y4M, from a folder of pictures, from anything else by ffmpeg, or
/// rendered.
#[derive(Debug)]
pub struct Footage {
    path: PathBuf,
    source: Box<dyn Source>,
}

/// A kind of footage. Several threads may read at once.
pub(super) trait Source: Debug + Send + Sync {
    fn frames(&self) -> usize;

    /// `[height, width]`.
    fn size(&self) -> [usize; 2];

    /// Some frames of those there are, at least one, in a size that is not empty.
    fn read(&self, frames: Range<usize>, size: [usize; 2]) -> Result<Vec<Picture>, InputError>;
}

impl Footage {
    /// Looks at a clip: a file, or a folder of pictures (of the formats that the crate `image` is built with).
    ///
    /// # Errors
    /// If it cannot be read, holds no frames, or is of a kind that does not work here.
    pub fn open(path: &Path) -> Result<Self, InputError> {
        let found = path.metadata().map_err(|error| wrong(path, error))?;
        let source: Box<dyn Source> = match extension(path).as_str() {
            _ if found.is_dir() => Box::new(Pictures::open(path)?),
            "y4m" => Box::new(Y4m::open(path)?),
            _ => Box::new(Ffmpeg::open(path)?),
        };
        if source.frames() == 0 {
            return Err(wrong(path, "there is no frame in it; give a clip with one at least"));
        }
        Ok(Self {
            path: path.into(),
            source,
        })
    }

    /// The rendered scene, which needs no file: so many frames of a red ball that bounces over a green field under a blue
    /// sky, while a white box crosses behind it. It is drawn in any size.
    pub fn scene(frames: usize) -> Self {
        Self {
            path: "(rendered)".into(),
            source: Box::new(Scene { frames }),
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many frames there are.
    pub fn frames(&self) -> usize {
        self.source.frames()
    }

    /// The size in which it was made, `[height, width]`.
    pub fn size(&self) -> [usize; 2] {
        self.source.size()
    }

    /// Reads these frames and no others, scaled to cover the size `[height, width]` and cropped to its centre. Each call
    /// has a file handle, or an ffmpeg, of its own.
    ///
    /// # Errors
    /// If the frames reach past the end, the size is empty, or reading fails.
    pub fn read(&self, frames: Range<usize>, size: [usize; 2]) -> Result<Vec<Picture>, InputError> {
        let Range { start, end } = frames;
        if end > self.frames() {
            return Err(wrong(
                &self.path,
                format_args!(
                    "frames {start}..{end} reach past its end; ask for some of 0..{}",
                    self.frames()
                ),
            ));
        }
        if size.contains(&0) {
            let [height, width] = size;
            return Err(wrong(
                &self.path,
                format_args!("no picture is {width}x{height}; ask for 1x1 at least"),
            ));
        }
        if frames.is_empty() {
            return Ok(Vec::new());
        }
        self.source.read(frames, size)
    }
}
