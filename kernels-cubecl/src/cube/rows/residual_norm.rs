//! A residual connection with dropout, and the norm behind it.

use burn_cubecl::tensor::CubeTensor;

use super::norm_forward;
use crate::{DropoutSpec, checks};

/// `(sum, y, mean, 1 / std)`: see [`Kernels::residual_norm_forward`](crate::Kernels::residual_norm_forward).
pub fn forward(
    x: CubeTensor,
    update: CubeTensor,
    dropout: Option<&DropoutSpec>,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    eps: f64,
) -> (CubeTensor, CubeTensor, Option<CubeTensor>, CubeTensor) {
    checks::residual_norm(&x, &update, &weight, bias.as_ref());
    if let Some(spec) = dropout {
        checks::dropout(&update, spec);
    }
    let (sum, normed) = norm_forward::forward("residual_norm", x, Some((update, dropout)), weight, bias, eps);
    (sum.expect("there is an update"), normed.y, normed.mean, normed.inverse)
}
