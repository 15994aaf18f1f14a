use burn::tensor::{DType, Device, Tensor, TensorData};
use kernels_cubecl::{Positions, RotaryStyle};

/// Rotary position embedding (arXiv 2104.09864): pair `i` of a head turns by `position * theta^(-2i / head_dim)`.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Base of the wavelengths.
    pub theta: f64,
    /// Which elements form a pair.
    pub style: RotaryStyle,
}

/// The cosines and sines of some positions, to be made once a forward pass and used by every layer.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    cos: Tensor<2>,
    sin: Tensor<2>,
    style: RotaryStyle,
}

impl Rotary {
    /// The table of the given *global* positions, computed in f64; there is no longest position.
    ///
    /// `dtype` is that of the tensors to turn; the table is f64 for f64 and f32 otherwise.
    pub fn table(&self, positions: &Positions, dtype: DType, device: &Device) -> RotaryTable {
        assert!(
            self.head_dim.is_multiple_of(2),
            "rotary: head_dim {} is odd; use an even one",
            self.head_dim
        );
        let pairs = self.head_dim / 2;
        let inverse: Vec<f64> = (0..pairs)
            .map(|pair| self.theta.powf(-2.0 * pair as f64 / self.head_dim as f64))
            .collect();
        let angles = positions
            .iter()
            .flat_map(|position| inverse.iter().map(move |inverse| position as f64 * inverse));
        let (sin, cos): (Vec<f64>, Vec<f64>) = angles.map(f64::sin_cos).unzip();
        let shape = [positions.len(), pairs];
        let tensor = |values: Vec<f64>| {
            let dtype = kernels_cubecl::accumulation(dtype);
            Tensor::from_data(TensorData::new(values, shape).convert_dtype(dtype), (device, dtype))
        };
        RotaryTable {
            cos: tensor(cos),
            sin: tensor(sin),
            style: self.style,
        }
    }
}

impl RotaryTable {
    /// Turns the heads of each token.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, heads, head_dim]`, tokens those of the table
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        kernels_cubecl::rotary(x, self.cos.clone(), self.sin.clone(), self.style)
    }
}
