//! NaN and infinity.
//!
//! Where there may be NaN, only equality is safe, and a look at the bits: compilers of shaders turn `x < y` into not
//! `x >= y`, and that of wgpu takes NaN for equal where it is asked `x != y`.

use cubecl::prelude::*;

/// The largest score as it is returned, given the sum of the weights: a sum of NaN alone has no largest term, but is not
/// nothing.
#[cube]
pub fn largest_of<A: Float>(largest: A, sum: A, nothing: A) -> A {
    let only_nan = select(largest == nothing, sum, largest);
    select(sum == A::from_int(0), largest, only_nan)
}

/// Whether `x` is neither NaN nor infinite.
#[cube]
pub fn is_finite<A: Float>(x: A) -> bool {
    let x = Vector::<A, Const<1>>::new(x);
    !(x.is_nan().extract(0usize) || x.is_inf().extract(0usize))
}
