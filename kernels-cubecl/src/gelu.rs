//! The numbers of GELU's tanh approximation, in the form that the kernels compute:
//! `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(LINEAR x + CUBIC x^3)`, as `1 + tanh(u) = 2 sigmoid(2 u)`.

use std::f64::consts::{FRAC_2_SQRT_PI, SQRT_2};

/// `2 sqrt(2/pi)`.
pub const LINEAR: f64 = FRAC_2_SQRT_PI * SQRT_2;

/// `2 sqrt(2/pi) * 0.044715`.
pub const CUBIC: f64 = LINEAR * 0.044715;
