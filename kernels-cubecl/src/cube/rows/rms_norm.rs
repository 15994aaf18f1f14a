//! Root mean square norm over the last dimension.

use burn_cubecl::tensor::CubeTensor;

use super::{norm_backward, norm_forward};
use crate::checks;

/// `(y, 1 / rms)`.
pub fn forward(x: CubeTensor, weight: CubeTensor, eps: f64) -> (CubeTensor, CubeTensor) {
    checks::norm("rms_norm", &x, &weight, None);
    let (_, normed) = norm_forward::forward("rms_norm", x, None, weight, None, eps);
    (normed.y, normed.inverse)
}

/// `(dx, dweight)`.
pub fn backward(
    x: CubeTensor,
    weight: CubeTensor,
    inverse_rms: CubeTensor,
    grad: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let op = "rms_norm backward";
    checks::norm_backward(op, &x, &weight, &[("inverse_rms", &inverse_rms)], &grad);
    let (dx, dweight, _) = norm_backward::backward(op, x, weight, None, inverse_rms, grad);
    (dx, dweight)
}
