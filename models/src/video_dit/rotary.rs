use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::attention::{Positions, RotaryStyle};
use burn_sp::kernels::accumulation;

use super::VideoGrid;

/// Base of the wavelengths.
const THETA: f64 = 10000.0;

/// Rotary position embedding over three axes (Wan): of a head's elements, neighbours pair up; a first section turns by the
/// frame, a second by the row, a third by the column. Pair `i` of a section of `d` elements turns by
/// `position * 10000^(-2i / d)`.
///
/// A table of some tokens, to be made once a forward pass and used by every block.
#[derive(Clone, Debug)]
pub struct VideoRotary {
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl VideoRotary {
    /// The table of the tokens at these *global* positions, computed in f64; there is no longest video.
    ///
    /// `dtype` is that of the tensors to turn; the table is f64 for f64 and f32 otherwise.
    ///
    /// # Panics
    /// If `head_dim` is odd, or there are tokens and the grid has none.
    pub fn new(grid: &VideoGrid, positions: &Positions, head_dim: usize, dtype: DType, device: &Device) -> Self {
        assert!(
            head_dim.is_multiple_of(2),
            "video rotary: head_dim {head_dim} is odd; use an even one"
        );
        let sections = sections(head_dim);
        let inverse = sections.map(|size| -> Vec<f64> {
            let pair = |pair: usize| THETA.powf(-2.0 * pair as f64 / size as f64);
            (0..size / 2).map(pair).collect()
        });
        let mut angles = Vec::with_capacity(positions.len() * head_dim / 2);
        for position in positions.iter() {
            for (index, inverse) in grid.locate(position).into_iter().zip(&inverse) {
                angles.extend(inverse.iter().map(|inverse| index as f64 * inverse));
            }
        }
        let (sin, cos): (Vec<f64>, Vec<f64>) = angles.into_iter().map(f64::sin_cos).unzip();
        let dtype = accumulation(dtype);
        let tensor = |values: Vec<f64>| {
            let data = TensorData::new(values, [positions.len(), head_dim / 2]);
            Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
        };
        Self {
            cos: tensor(cos),
            sin: tensor(sin),
        }
    }

    /// Turns the heads of each token.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, heads, head_dim]`, tokens those of the table, and so is the result
    ///
    /// # Panics
    /// If tokens, `head_dim` or dtype are not those of the table.
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        kernels_cubecl::rotary(x, self.cos.clone(), self.sin.clone(), RotaryStyle::Interleaved)
    }
}

/// Elements of a head that turn by frame, row and column.
fn sections(head_dim: usize) -> [usize; 3] {
    let side = 2 * (head_dim / 6);
    [head_dim - 2 * side, side, side]
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_head_of_128_splits_as_wans_does() {
        assert_eq!(sections(128), [44, 42, 42]);
        assert_eq!(sections(16), [8, 4, 4]);
        assert_eq!(sections(4), [4, 0, 0]);
    }

    /// Far beyond any table, angles are right to f64's last digits.
    #[test]
    fn there_is_no_longest_video() {
        let grid = VideoGrid {
            frames: 100_000,
            rows: 2,
            columns: 2,
        };
        let position = 99_999 * 4 + 3;
        let at = Positions::new([position..position + 1]);
        let table = VideoRotary::new(&grid, &at, 12, DType::F64, &Device::flex());
        let cos: Vec<f64> = table.cos.into_data().iter::<f64>().collect();
        let angles = [99_999.0, 99_999.0 * 0.01, 1.0, 0.01, 1.0, 0.01];
        let expected: Vec<f64> = angles.iter().map(|angle: &f64| angle.cos()).collect();
        for (found, expected) in cos.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-10, "{cos:?}, expected {expected:?}");
        }
    }
}
