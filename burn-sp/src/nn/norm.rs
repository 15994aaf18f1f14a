use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use kernels_cubecl::DropoutSpec;

use super::{Dropout, DropoutKey};
use crate::SpTensor;

/// Configuration of [`RmsNorm`].
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Size of the last dimension.
    pub features: usize,
    /// Added to the mean square.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl RmsNormConfig {
    /// A norm with weight 1.
    pub fn init(&self, device: &Device) -> RmsNorm {
        RmsNorm {
            gamma: Initializer::Ones.init([self.features], device),
            epsilon: self.epsilon,
        }
    }
}

/// Root mean square norm over the last dimension, `x / sqrt(mean(x^2) + eps) * gamma` (Zhang and Sennrich, arXiv
/// 1910.07467).
///
/// Like Burn's, but fused: it keeps its input and one number a row for backward, and computes f64 in f64 and bf16 in f32.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// The weight, `[features]`.
    pub gamma: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl RmsNorm {
    /// # Shapes
    /// - `x`: `[..., features]`, and so is the result
    ///
    /// # Panics
    /// If `x` has other features than the norm, or another dtype.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        kernels_cubecl::rms_norm(x, self.gamma.val(), self.epsilon)
    }

    /// A branch joins the residual stream: `x + dropout(branch)` and the norm of it, in one pass.
    ///
    /// # Shapes
    /// - `x`, `branch`: `[..., features]`, laid out alike, and so are both results
    ///
    /// # Panics
    /// If the layouts differ or are partial.
    #[track_caller]
    pub fn forward_residual<const D: usize>(
        &self,
        x: SpTensor<D>,
        branch: SpTensor<D>,
        dropout: Dropout,
        key: Option<DropoutKey>,
    ) -> (SpTensor<D>, SpTensor<D>) {
        residual(x, branch, dropout, key, |x, branch, dropout| {
            kernels_cubecl::residual_rms_norm(x, branch, dropout, self.gamma.val(), self.epsilon)
        })
    }
}

/// Configuration of [`LayerNorm`].
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    /// Size of the last dimension.
    pub features: usize,
    /// Added to the variance.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl LayerNormConfig {
    /// A norm with weight 1 and bias 0.
    pub fn init(&self, device: &Device) -> LayerNorm {
        LayerNorm {
            gamma: Initializer::Ones.init([self.features], device),
            beta: Initializer::Zeros.init([self.features], device),
            epsilon: self.epsilon,
        }
    }
}

/// Layer norm over the last dimension, `(x - mean) / sqrt(var + eps) * gamma + beta` with the biased variance (Ba et
/// al., arXiv 1607.06450).
///
/// Like Burn's, but fused: it keeps its input and two numbers a row for backward.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// The weight, `[features]`.
    pub gamma: Param<Tensor<1>>,
    /// The bias, `[features]`.
    pub beta: Param<Tensor<1>>,
    /// Added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
    /// # Shapes
    /// - `x`: `[..., features]`, and so is the result
    ///
    /// # Panics
    /// If `x` has other features than the norm, or another dtype.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        kernels_cubecl::layer_norm(x, self.gamma.val(), self.beta.val(), self.epsilon)
    }

    /// As [`RmsNorm::forward_residual`].
    ///
    /// # Shapes
    /// - as there
    ///
    /// # Panics
    /// As there.
    #[track_caller]
    pub fn forward_residual<const D: usize>(
        &self,
        x: SpTensor<D>,
        branch: SpTensor<D>,
        dropout: Dropout,
        key: Option<DropoutKey>,
    ) -> (SpTensor<D>, SpTensor<D>) {
        residual(x, branch, dropout, key, |x, branch, dropout| {
            let (gamma, beta) = (self.gamma.val(), self.beta.val());
            kernels_cubecl::residual_layer_norm(x, branch, dropout, gamma, beta, self.epsilon)
        })
    }
}

#[track_caller]
fn residual<const D: usize>(
    x: SpTensor<D>,
    branch: SpTensor<D>,
    dropout: Dropout,
    key: Option<DropoutKey>,
    fused: impl FnOnce(Tensor<D>, Tensor<D>, Option<DropoutSpec>) -> (Tensor<D>, Tensor<D>),
) -> (SpTensor<D>, SpTensor<D>) {
    const OPERATION: &str = "forward_residual";
    x.same_layout(OPERATION, &branch);
    let mask = dropout.mask(&x, key);
    let (layout, mesh) = (x.layout().clone(), x.mesh().clone());
    // Leaving a layout refuses partial values.
    let (sum, y) = fused(x.into_local(), branch.into_local(), mask);
    let lay = |local| SpTensor::checked(OPERATION, local, layout.clone(), mesh.clone());
    (lay(sum), lay(y))
}
