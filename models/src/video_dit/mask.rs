use std::ops::Range;

use burn_sp::attention::{Blocks, Mask};
use serde::{Deserialize, Serialize};

use super::VideoGrid;

/// How the frames of a video fall into the blocks that are denoised one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameBlocks {
    /// Latent frames in a block.
    pub frames: usize,
    /// Whether the first frame is a block of its own, as where a video goes on from an image.
    #[serde(default)]
    pub image_first: bool,
}

impl FrameBlocks {
    /// Blocks of this many frames.
    pub fn new(frames: usize) -> Self {
        Self {
            frames,
            image_first: false,
        }
    }

    /// The first frame is a block of its own.
    pub fn with_image_first(self) -> Self {
        Self {
            image_first: true,
            ..self
        }
    }

    /// The block that a frame lies in.
    ///
    /// # Panics
    /// If a block is empty.
    pub fn block_of(&self, frame: usize) -> usize {
        match (self.image_first, frame) {
            (false, _) => frame / self.frames,
            (true, 0) => 0,
            (true, _) => 1 + (frame - 1) / self.frames,
        }
    }

    /// How many blocks so many frames are; the last may have fewer.
    ///
    /// # Panics
    /// If a block is empty.
    pub fn count(&self, frames: usize) -> usize {
        frames.checked_sub(1).map_or(0, |last| self.block_of(last) + 1)
    }

    /// The frames of a block, of so many frames in all; none past the last block.
    pub fn range(&self, block: usize, frames: usize) -> Range<usize> {
        let start = |block: usize| match (self.image_first, block) {
            (false, _) => block * self.frames,
            (true, 0) => 0,
            (true, _) => 1 + (block - 1) * self.frames,
        };
        start(block).min(frames)..start(block + 1).min(frames)
    }

    /// As blocks of tokens.
    ///
    /// # Panics
    /// If a block or a frame is empty.
    pub fn tokens(&self, grid: &VideoGrid) -> Blocks {
        let blocks = Blocks::new(self.frames * grid.tokens_per_frame());
        if self.image_first {
            blocks.with_first(grid.tokens_per_frame())
        } else {
            blocks
        }
    }
}

/// Which tokens of a video see which, in frames; [`over`](Self::over) a grid it is a [`Mask`] of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VideoMask {
    /// Every token sees every token.
    #[default]
    Full,
    /// A token sees its own block of frames and earlier ones.
    BlockCausal {
        /// The blocks.
        blocks: FrameBlocks,
        /// If given, only as many frames, back from the end of the token's block, stay visible.
        window: Option<usize>,
        /// How many frames at the start stay visible, beside the window.
        sink: usize,
    },
    /// Teacher forcing: the sequence holds the video twice, clean and then noisy. A clean token sees clean blocks up to its
    /// own, a noisy token clean blocks before its own and its own noisy block.
    TeacherForcing {
        /// The blocks of either half.
        blocks: FrameBlocks,
    },
}

impl VideoMask {
    /// [`BlockCausal`](Self::BlockCausal) without window.
    pub fn block_causal(blocks: FrameBlocks) -> Self {
        Self::BlockCausal {
            blocks,
            window: None,
            sink: 0,
        }
    }

    /// [`BlockCausal`](Self::BlockCausal) that sees `window` frames back, and the first `sink`.
    pub fn local(blocks: FrameBlocks, window: usize, sink: usize) -> Self {
        Self::BlockCausal {
            blocks,
            window: Some(window),
            sink,
        }
    }

    /// [`TeacherForcing`](Self::TeacherForcing).
    pub fn teacher_forcing(blocks: FrameBlocks) -> Self {
        Self::TeacherForcing { blocks }
    }

    /// How often the sequence holds the video: twice under teacher forcing, else once.
    pub fn copies(&self) -> usize {
        match self {
            VideoMask::Full | VideoMask::BlockCausal { .. } => 1,
            VideoMask::TeacherForcing { .. } => 2,
        }
    }

    /// What cannot work, in one line; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        let (blocks, window) = match self {
            VideoMask::Full => return None,
            VideoMask::BlockCausal { blocks, window, .. } => (blocks, *window),
            VideoMask::TeacherForcing { blocks } => (blocks, None),
        };
        if blocks.frames == 0 {
            return Some("a block has 0 frames; use at least 1".into());
        }
        let window = window.filter(|window| *window < blocks.frames)?;
        Some(format!(
            "a window of {window} frames is shorter than a block of {}; a block must see itself",
            blocks.frames
        ))
    }

    /// The mask of a sequence of this grid's tokens, over global positions.
    ///
    /// # Panics
    /// If the mask has a [`problem`](Self::problem), or the grid's frames have no tokens.
    pub fn over(&self, grid: &VideoGrid) -> Mask {
        if let Some(problem) = self.problem() {
            panic!("video mask: {problem}");
        }
        let tokens = |frames: usize| frames * grid.tokens_per_frame();
        match *self {
            VideoMask::Full => Mask::Full,
            VideoMask::BlockCausal { blocks, window, sink } => Mask::BlockCausal {
                blocks: blocks.tokens(grid),
                window: window.map(tokens),
                sink: tokens(sink),
            },
            VideoMask::TeacherForcing { blocks } => Mask::TeacherForcing {
                blocks: blocks.tokens(grid),
                half: grid.tokens(),
            },
        }
    }
}
