use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// How the tokens of a video lie: one a patch, the columns of a row, then the rows of a frame, then the frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VideoGrid {
    /// Latent frames of the video.
    pub frames: usize,
    /// Patches from top to bottom.
    pub rows: usize,
    /// Patches from left to right.
    pub columns: usize,
}

impl VideoGrid {
    /// Tokens of a frame.
    pub fn tokens_per_frame(&self) -> usize {
        self.rows * self.columns
    }

    /// Tokens of the video.
    pub fn tokens(&self) -> usize {
        self.frames * self.tokens_per_frame()
    }

    /// Frame, row and column of the token at a *global* position.
    ///
    /// A sequence may hold the video twice, clean and then noisy: both start at frame 0.
    ///
    /// # Panics
    /// If the grid has no tokens.
    pub fn locate(&self, position: usize) -> [usize; 3] {
        let (frame, within) = (position / self.tokens_per_frame(), position % self.tokens_per_frame());
        [frame % self.frames, within / self.columns, within % self.columns]
    }
}

/// Latents as the model reads them: of each token the channels, of each channel the rows and columns of the patch, in the
/// order of a convolution's weight.
///
/// # Shapes
/// - `latents`: `[batch, channels, frames, height, width]`
/// - returns `[batch, tokens, channels * patch * patch]`
///
/// # Panics
/// If height or width is no multiple of `patch`.
pub fn input_patches(latents: Tensor<5>, patch: usize) -> Tensor<3> {
    patches(latents, patch, [0, 2, 3, 5, 1, 4, 6])
}

/// Latents, or a velocity of them, as the model writes it: of each token the rows and columns of the patch, channels last.
///
/// # Shapes
/// - `latents`: `[batch, channels, frames, height, width]`
/// - returns `[batch, tokens, patch * patch * channels]`
///
/// # Panics
/// As [`input_patches`].
pub fn output_patches(latents: Tensor<5>, patch: usize) -> Tensor<3> {
    patches(latents, patch, [0, 2, 3, 5, 4, 6, 1])
}

/// The latents of [`output_patches`].
///
/// # Shapes
/// - `patches`: `[batch, tokens, patch * patch * channels]`
/// - returns `[batch, channels, frames, height, width]`, as many frames as there are tokens
///
/// # Panics
/// If the tokens are not those of whole frames of the grid.
pub fn from_output_patches(patches: Tensor<3>, grid: &VideoGrid, patch: usize) -> Tensor<5> {
    let [batch, tokens, features] = patches.dims();
    let VideoGrid { rows, columns, .. } = *grid;
    assert!(
        tokens.is_multiple_of(grid.tokens_per_frame()) && features.is_multiple_of(patch * patch),
        "from_output_patches: {:?} are not whole frames of {rows} x {columns} patches of {patch} x {patch}",
        patches.dims()
    );
    let (frames, channels) = (tokens / grid.tokens_per_frame(), features / (patch * patch));
    let apart = patches.reshape([batch, frames, rows, columns, patch, patch, channels]);
    let apart = apart.permute([0, 6, 1, 2, 4, 3, 5]);
    apart.reshape([batch, channels, frames, rows * patch, columns * patch])
}

/// `order` is that of `[batch, channels, frames, rows, patch rows, columns, patch columns]`.
fn patches(latents: Tensor<5>, patch: usize, order: [usize; 7]) -> Tensor<3> {
    let [batch, channels, frames, height, width] = latents.dims();
    assert!(
        patch > 0 && height.is_multiple_of(patch) && width.is_multiple_of(patch),
        "patches: {height} x {width} latents do not fall into patches of {patch} x {patch}"
    );
    let (rows, columns) = (height / patch, width / patch);
    let apart = latents.reshape([batch, channels, frames, rows, patch, columns, patch]);
    apart
        .permute(order)
        .reshape([batch, frames * rows * columns, channels * patch * patch])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_count_columns_then_rows_then_frames() {
        let grid = VideoGrid {
            frames: 2,
            rows: 2,
            columns: 3,
        };
        assert_eq!((grid.tokens_per_frame(), grid.tokens()), (6, 12));
        let located: Vec<_> = [0, 1, 3, 6, 11].map(|position| grid.locate(position)).into();
        assert_eq!(located, [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 2]]);
        // The noisy half starts again.
        assert_eq!(grid.locate(12 + 7), grid.locate(7));
    }
}
