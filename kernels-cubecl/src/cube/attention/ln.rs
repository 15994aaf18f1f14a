//! The logarithm in every float type.

use cubecl::prelude::*;

use crate::cube::exp::exp;

/// `ln x` of an `x` between the smallest and the largest f32.
///
/// WGSL and SPIR-V have one of 32 bits at most. That of f64 is the one of f32 and a step of Halley's method towards
/// `e^y = x`, which triples the number of right digits.
#[cube]
pub fn ln<A: Float>(x: A) -> A {
    let size = A::size().comptime();
    if comptime![size == 8] {
        let near = A::cast_from(f32::cast_from(x).ln());
        let power = exp::<A>(near);
        near + A::from_int(2) * (x - power) / (x + power)
    } else {
        x.ln()
    }
}
