use burn::tensor::{DType, Device, Tensor, TensorData};
use kernels_cubecl::{Positions, RotaryStyle};
use serde::{Deserialize, Serialize};

/// Rotary position embedding (arXiv 2104.09864): pair `i` of a head turns by `position * theta^(-2i / head_dim)`, or more
/// slowly if that is scaled.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Base of the wavelengths, which are `2 pi theta^(2i / head_dim)` tokens; 10,000 in the paper.
    pub theta: f64,
    /// Which elements form a pair.
    pub style: RotaryStyle,
    /// How the angles are scaled.
    pub scaling: RotaryScaling,
}

/// How the angles of rotary positions are scaled, so that a model takes sequences longer than those it was trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum RotaryScaling {
    /// They are not.
    #[default]
    None,
    /// All are divided (arXiv 2306.15595).
    Linear {
        /// By this.
        factor: f64,
    },
    /// Those of long wavelengths are divided, those of short ones are not, and in between the two are mixed, as Llama 3.1
    /// has it (`_compute_llama3_parameters` in transformers' `modeling_rope_utils.py`).
    Llama3 {
        /// By this.
        factor: f64,
        /// Wavelengths above the trained length over this are long.
        low_freq_factor: f64,
        /// Wavelengths below the trained length over this are short; above `low_freq_factor`.
        high_freq_factor: f64,
        /// The trained length, in tokens.
        original_length: usize,
    },
}

impl RotaryScaling {
    /// What cannot work, in one line; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        let wrong = |name: &str, value: f64| Some(format!("rotary scaling {name} {value} is not above 0"));
        let above = |value: f64| value.is_finite() && value > 0.0;
        match *self {
            Self::Linear { factor } | Self::Llama3 { factor, .. } if !above(factor) => wrong("factor", factor),
            Self::Llama3 { original_length: 0, .. } => wrong("original_length", 0.0),
            Self::Llama3 {
                low_freq_factor: low,
                high_freq_factor: high,
                ..
            } if !(above(low) && high.is_finite() && high > low) => Some(format!(
                "rotary scaling low_freq_factor {low} is not above 0 and below high_freq_factor {high}"
            )),
            _ => None,
        }
    }

    /// The angle between neighbouring positions, from what it would be without scaling.
    fn apply(&self, angle: f64) -> f64 {
        match *self {
            Self::None => angle,
            Self::Linear { factor } => angle / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_length,
            } => {
                let turns = original_length as f64 * angle / std::f64::consts::TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                angle * (kept + (1.0 - kept) / factor)
            }
        }
    }
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
    ///
    /// # Panics
    /// If `head_dim` is odd.
    pub fn table(&self, positions: &Positions, dtype: DType, device: &Device) -> RotaryTable {
        assert!(
            self.head_dim.is_multiple_of(2),
            "rotary: head_dim {} is odd; use an even one",
            self.head_dim
        );
        let pairs = self.head_dim / 2;
        let inverse: Vec<f64> = (0..pairs)
            .map(|pair| self.theta.powf(-2.0 * pair as f64 / self.head_dim as f64))
            .map(|angle| self.scaling.apply(angle))
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
    /// - `x`: `[batch, tokens, heads, head_dim]`, tokens those of the table, and so is the result
    ///
    /// # Panics
    /// If tokens, `head_dim` or dtype are not those of the table.
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        kernels_cubecl::rotary(x, self.cos.clone(), self.sin.clone(), self.style)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Angles of theta 500,000 and 16 elements a head, as transformers 5.24 has them (in f32).
    const LLAMA3: [f64; 8] = [
        1.0,
        0.193922758102417,
        0.03760603070259094,
        0.00729266507551074,
        0.0005248460220173001,
        3.428102354519069e-05,
        6.647869668086059e-06,
        1.289173155782919e-06,
    ];
    const LINEAR: [f64; 8] = [
        0.25,
        0.04848068952560425,
        0.009401507675647736,
        0.001823166268877685,
        0.0003535533614922315,
        6.856204709038138e-05,
        1.3295739336172119e-05,
        2.578346311565838e-06,
    ];

    #[test]
    fn scaled_angles_are_those_of_transformers() {
        let llama3 = RotaryScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_length: 8192,
        };
        let linear = RotaryScaling::Linear { factor: 4.0 };
        for (scaling, expected) in [(llama3, LLAMA3), (linear, LINEAR)] {
            for (pair, expected) in expected.into_iter().enumerate() {
                let found = scaling.apply(500_000f64.powf(-(pair as f64) / 8.0));
                assert!(
                    (found / expected - 1.0).abs() < 1e-6,
                    "{scaling:?} {pair}: {found}, {expected}"
                );
            }
        }
    }
}
