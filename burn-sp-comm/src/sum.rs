//! Adding up blocks of elements.

use burn_std::{bf16, f16};
use half::slice::HalfFloatSliceExt;
use std::mem::MaybeUninit;

/// The most elements that are added up at a time: all sources of a block while the sum is in the first cache.
pub(crate) const BLOCK: usize = 1024;

/// Elements that can be added up.
pub(crate) trait Sum: Copy + Default {
    /// Writes the sum of the sources, added in their order, for a block of at most [`BLOCK`] elements.
    ///
    /// `sources` has at least one element, and all of them are as long as `out`. Every element of `out` is written.
    fn sum(out: &mut [MaybeUninit<Self>], sources: &[&[Self]]);
}

macro_rules! sum_in_its_own_type {
    ($add:expr; $($type:ty),*) => {$(
        impl Sum for $type {
            fn sum(out: &mut [MaybeUninit<$type>], sources: &[&[$type]]) {
                let add: fn($type, $type) -> $type = $add;
                // Up to four sources at once: then the sum goes through no memory but the result's.
                let rest = match sources {
                    [a, b, c, d, rest @ ..] => {
                        for ((((out, a), b), c), d) in out.iter_mut().zip(*a).zip(*b).zip(*c).zip(*d) {
                            out.write(add(add(add(*a, *b), *c), *d));
                        }
                        rest
                    }
                    [a, b, c] => {
                        for (((out, a), b), c) in out.iter_mut().zip(*a).zip(*b).zip(*c) {
                            out.write(add(add(*a, *b), *c));
                        }
                        &[]
                    }
                    [a, b] => {
                        for ((out, a), b) in out.iter_mut().zip(*a).zip(*b) {
                            out.write(add(*a, *b));
                        }
                        &[]
                    }
                    _ => {
                        out.iter_mut().zip(sources[0]).for_each(|(out, a)| *out = MaybeUninit::new(*a));
                        &sources[1..]
                    }
                };
                for source in rest {
                    for (out, value) in out.iter_mut().zip(*source) {
                        // SAFETY: all of `out` has been written above.
                        out.write(add(unsafe { out.assume_init() }, *value));
                    }
                }
            }
        }
    )*};
}

sum_in_its_own_type!(|a, b| a + b; f32, f64);
sum_in_its_own_type!(|a, b| a.wrapping_add(b); i8, i16, i32, i64, u8, u16, u32, u64);
sum_in_its_own_type!(|a, b| Or(a.0 | b.0); Or<u8>, Or<u32>);

/// A stored boolean: the sum of booleans is "any of them".
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Or<T>(T);

/// The width in which the 16-bit types are added up: a few registers, as rows may be short.
const STRIPE: usize = 64;

impl Sum for bf16 {
    fn sum(out: &mut [MaybeUninit<bf16>], sources: &[&[bf16]]) {
        let mut acc = [0.0; STRIPE];
        for (stripe, out) in out.chunks_mut(STRIPE).enumerate() {
            let range = stripe * STRIPE..stripe * STRIPE + out.len();
            let acc = &mut acc[..out.len()];
            acc.iter_mut()
                .zip(&sources[0][range.clone()])
                .for_each(|(acc, value)| *acc = widen(*value));
            for source in &sources[1..] {
                acc.iter_mut()
                    .zip(&source[range.clone()])
                    .for_each(|(acc, value)| *acc += widen(*value));
            }
            out.iter_mut()
                .zip(acc)
                .for_each(|(out, acc)| *out = MaybeUninit::new(narrow(*acc)));
        }
    }
}

fn widen(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Nearest, ties to even, without a branch, so that the loop becomes SIMD code.
fn narrow(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

impl Sum for f16 {
    fn sum(out: &mut [MaybeUninit<f16>], sources: &[&[f16]]) {
        // Conversion by the slice uses the hardware's instruction, one by one it does not.
        let (mut acc, mut wide, mut rounded) = ([0.0; STRIPE], [0.0; STRIPE], [f16::ZERO; STRIPE]);
        for (stripe, out) in out.chunks_mut(STRIPE).enumerate() {
            let range = stripe * STRIPE..stripe * STRIPE + out.len();
            let (acc, wide, rounded) = (&mut acc[..out.len()], &mut wide[..out.len()], &mut rounded[..out.len()]);
            sources[0][range.clone()].convert_to_f32_slice(acc);
            for source in &sources[1..] {
                source[range.clone()].convert_to_f32_slice(wide);
                acc.iter_mut().zip(&*wide).for_each(|(acc, value)| *acc += *value);
            }
            rounded.convert_from_f32_slice(acc);
            out.iter_mut()
                .zip(&*rounded)
                .for_each(|(out, value)| *out = MaybeUninit::new(*value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_like_half() {
        let check = |bits: u32| {
            let value = f32::from_bits(bits);
            assert_eq!(narrow(value).to_bits(), bf16::from_f32(value).to_bits(), "{bits:#x}");
        };
        (0..=u32::MAX).step_by(4099).for_each(check);
        let high = [
            0, 0x3f80, 0x3f81, 0x7f7f, 0x7f80, 0x7fc0, 0x8000, 0xff7f, 0xff80, 0xffff,
        ];
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            high.into_iter().for_each(|high: u32| check(high << 16 | low));
        }
    }
}
