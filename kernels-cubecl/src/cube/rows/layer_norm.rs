//! Layer norm over the last dimension.

use burn_cubecl::tensor::CubeTensor;

use super::{norm_backward, norm_forward};
use crate::checks;

/// `(y, mean, 1 / std)`.
pub fn forward(x: CubeTensor, weight: CubeTensor, bias: CubeTensor, eps: f64) -> (CubeTensor, CubeTensor, CubeTensor) {
    checks::norm("layer_norm", &x, &weight, Some(&bias));
    let (_, normed) = norm_forward::forward("layer_norm", x, None, weight, Some(bias), eps);
    let mean = normed.mean.expect("there is a bias");
    (normed.y, mean, normed.inverse)
}

/// `(dx, dweight, dbias)`.
pub fn backward(
    x: CubeTensor,
    weight: CubeTensor,
    mean: CubeTensor,
    inverse_std: CubeTensor,
    grad: CubeTensor,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let op = "layer_norm backward";
    let statistics = [("mean", &mean), ("inverse_std", &inverse_std)];
    checks::norm_backward(op, &x, &weight, &statistics, &grad);
    let (dx, dweight, dbias) = norm_backward::backward(op, x, weight, Some(mean), inverse_std, grad);
    (dx, dweight, dbias.expect("there is a mean"))
}
