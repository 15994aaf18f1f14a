//! The exponential, and what is made of it, in every float type.
//!
//! WGSL and SPIR-V have one of 32 bits at most, and what they make of 64 bits is not even refused. So that of f64 is
//! computed here, on every device.

use cubecl::prelude::*;

/// `e^x`.
#[cube]
pub fn exp<A: Float>(x: A) -> A {
    let size = A::size().comptime();
    if comptime![size == 8] {
        exp_of_double::<A>(x)
    } else {
        x.exp()
    }
}

/// `e^x` of each element.
#[cube]
pub fn exp_each<A: Float, N: Size>(x: Vector<A, N>) -> Vector<A, N> {
    let size = A::size().comptime();
    if comptime![size == 8] {
        let mut y = Vector::<A, N>::zeroed();
        #[unroll]
        for lane in 0..N::value() {
            y.insert(lane, exp_of_double::<A>(x.extract(lane)));
        }
        y
    } else {
        x.exp()
    }
}

/// `1 / (1 + e^-x)` of each element; 0 where the exponential overflows.
#[cube]
pub fn sigmoid_each<A: Float, N: Size>(x: Vector<A, N>) -> Vector<A, N> {
    let one = Vector::<A, N>::from_int(1);
    one / (one + exp_each::<A, N>(-x))
}

/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, the series of `e^r`, and `2^n` by squaring.
#[cube]
fn exp_of_double<A: Float>(x: A) -> A {
    let (one, half) = (A::from_int(1), A::new(0.5));
    // Beyond these the result is infinite or 0 anyway, and `n` stays small; a NaN stays one.
    let clamped = select(x > A::from_int(720), A::from_int(720), x);
    let clamped = select(clamped < A::from_int(-760), A::from_int(-760), clamped);
    let scaled = clamped * A::new(std::f32::consts::LOG2_E);
    let n = i32::cast_from(scaled + select(scaled < A::from_int(0), -half, half));
    let turns = A::cast_from(n);
    // ln 2 as a sum of numbers of few bits, whose products with n are exact but for the last.
    let r = clamped - turns * A::new(0.693_359_4) - turns * A::new(-2.121_944_4e-4) - turns * A::new(1.646_595e-12);

    let mut series = one;
    #[unroll]
    for term in 0..14u32 {
        let inverse = one / A::from_int(comptime![14 - term as i64]);
        series = series * r * inverse + one;
    }

    let mut square = select(n < 0, half, A::from_int(2));
    let mut rest = select(n < 0, -n, n);
    let mut power = one;
    for _ in 0..11u32 {
        power = select(rest % 2 == 1, power * square, power);
        square = square * square;
        rest /= 2;
    }
    series * power
}
