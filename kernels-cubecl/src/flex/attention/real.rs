//! The numbers the kernels compute in, f32 and f64, and the one function they need that no library vectorises.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub};

use burn::tensor::Element;
use bytemuck::Pod;
use pulp::Simd;

/// An accumulation type.
pub trait Real:
    Element
    + Pod
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + MulAssign
{
    const ZERO: Self;
    const INFINITY: Self;
    const NEG_INFINITY: Self;

    fn from_f64(value: f64) -> Self;

    fn ln(self) -> Self;

    /// The exponential, to be inlined into a loop compiled for the instruction set `S`.
    fn exp<S: Simd>(self) -> Self;
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const INFINITY: Self = f64::INFINITY;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    fn from_f64(value: f64) -> Self {
        value
    }

    fn ln(self) -> Self {
        self.ln()
    }

    #[inline(always)]
    fn exp<S: Simd>(self) -> Self {
        self.exp()
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const INFINITY: Self = f32::INFINITY;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    fn from_f64(value: f64) -> Self {
        value as f32
    }

    fn ln(self) -> Self {
        self.ln()
    }

    /// `2^n * e^r` with `n = round(x / ln 2)`: free of branches and calls, so that the loop around it becomes vector
    /// code. Within 2 ulp; exactly 0 below the smallest normal result (and at negative infinity), no more than `e^88`
    /// above it.
    #[inline(always)]
    fn exp<S: Simd>(self) -> Self {
        // Adding this leaves the rounded integer in the low bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        // ln 2 in two parts, the first short enough for `n * LN2_HIGH` to be exact.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        const UNDERFLOW: f32 = -87.33;
        const OVERFLOW: f32 = 88.0;

        let x = if self > OVERFLOW { OVERFLOW } else { self };
        let rounded = mul_add::<S>(x, std::f32::consts::LOG2_E, ROUND);
        let n = rounded - ROUND;
        let r = mul_add::<S>(n, -LN2_LOW, mul_add::<S>(n, -LN2_HIGH, x));
        let mut p = 1.987_569_1e-4;
        for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = mul_add::<S>(p, r, coefficient);
        }
        let fraction = mul_add::<S>(p, r * r, r) + 1.0;
        let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
        if self < UNDERFLOW { 0.0 } else { fraction * power }
    }
}

/// One instruction where the processor has it; a call into the C library would be far slower than two operations.
#[inline(always)]
fn mul_add<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    if S::IS_SCALAR { a * b + c } else { a.mul_add(b, c) }
}

#[cfg(test)]
mod tests {
    use pulp::{Arch, Scalar, WithSimd};

    use super::*;

    struct Exp<'a>(&'a mut [f32]);

    impl WithSimd for Exp<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            self.0.iter_mut().for_each(|x| *x = Real::exp::<S>(*x));
        }
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let inputs: Vec<f32> = (0..2_000_000).map(|i| -87.3 + i as f32 * (175.0 / 2e6)).collect();
        let mut vector = inputs.clone();
        Arch::new().dispatch(Exp(&mut vector));
        let mut scalar = inputs.clone();
        Exp(&mut scalar).with_simd(Scalar::new());
        for (i, x) in inputs.into_iter().enumerate() {
            let exact = (x as f64).exp();
            let ulp = (f32::from_bits((exact as f32).to_bits() + 1) - exact as f32) as f64;
            for y in [vector[i], scalar[i]] {
                assert!((y as f64 - exact).abs() <= 2.0 * ulp, "exp({x}) = {y}, not {exact}");
            }
        }
    }

    #[test]
    fn exp_at_the_edges() {
        let mut values = [f32::NEG_INFINITY, -1e30, -88.0, 0.0, f32::NAN, f32::INFINITY];
        Arch::new().dispatch(Exp(&mut values));
        assert_eq!(values[..4], [0.0, 0.0, 0.0, 1.0]);
        assert!(values[4].is_nan());
        assert!(values[5].is_finite() && values[5] > 1e38);
    }
}
