//! The number types of the kernels: what tensors store and what the kernels compute with.

use std::{
    mem::MaybeUninit,
    ops::{Add, AddAssign, Div, Mul, Neg, Sub},
};

use burn::tensor::Element;
use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// An element type of a tensor; rows are converted to [`Acc`](Self::Acc) and back as a whole.
pub trait Scalar: Element + Pod {
    /// The type computed in.
    type Acc: Real;

    /// Converts into `out`, which it resizes.
    fn widen_into(row: &[Self], out: &mut Vec<Self::Acc>);

    /// The row in the type computed in: itself if that is its own, else converted into `scratch`.
    fn widen<'a>(row: &'a [Self], scratch: &'a mut Vec<Self::Acc>) -> &'a [Self::Acc];

    /// Lets `fill` write a row in the type computed in, and rounds it into `out`. `fill` must write every element.
    fn narrow(
        out: &mut [MaybeUninit<Self>],
        scratch: &mut Vec<Self::Acc>,
        fill: impl FnOnce(&mut [MaybeUninit<Self::Acc>]),
    );
}

/// A type the kernels compute with.
pub trait Real:
    Scalar<Acc = Self>
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The value below every other.
    const NEG_INFINITY: Self;

    /// Rounds to this type.
    fn of(value: f64) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Exponential; vectorises for f32.
    fn exp(self) -> Self;

    /// `1 / (1 + e^-x)`; 0 where the exponential overflows.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

/// A row as memory to write to.
///
/// Writing uninitialised values through it would be unsound; the kernels only ever write numbers.
#[inline(always)]
pub fn as_uninit<T: Pod>(row: &mut [T]) -> &mut [MaybeUninit<T>] {
    // SAFETY: same layout and lifetime, and see above: what is initialised stays so.
    unsafe { &mut *(std::ptr::from_mut(row) as *mut [MaybeUninit<T>]) }
}

macro_rules! real {
    ($type:ty, $exp:expr) => {
        impl Scalar for $type {
            type Acc = Self;

            #[inline(always)]
            fn widen_into(row: &[Self], out: &mut Vec<Self>) {
                out.clear();
                out.extend_from_slice(row);
            }

            #[inline(always)]
            fn widen<'a>(row: &'a [Self], _: &'a mut Vec<Self>) -> &'a [Self] {
                row
            }

            #[inline(always)]
            fn narrow(out: &mut [MaybeUninit<Self>], _: &mut Vec<Self>, fill: impl FnOnce(&mut [MaybeUninit<Self>])) {
                fill(out);
            }
        }

        impl Real for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = Self::NEG_INFINITY;

            #[inline(always)]
            fn of(value: f64) -> Self {
                value as Self
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }

            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
        }
    };
}

real!(f32, exp_f32);
real!(f64, f64::exp);

macro_rules! sixteen_bits {
    ($type:ty, $widen:expr, $narrow:expr) => {
        impl Scalar for $type {
            type Acc = f32;

            #[inline(always)]
            fn widen_into(row: &[Self], out: &mut Vec<f32>) {
                out.resize(row.len(), 0.0);
                $widen(row, out);
            }

            #[inline(always)]
            fn widen<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
                Self::widen_into(row, scratch);
                scratch
            }

            #[inline(always)]
            fn narrow(
                out: &mut [MaybeUninit<Self>],
                scratch: &mut Vec<f32>,
                fill: impl FnOnce(&mut [MaybeUninit<f32>]),
            ) {
                scratch.resize(out.len(), 0.0);
                fill(as_uninit(scratch));
                $narrow(scratch, out);
            }
        }
    };
}

sixteen_bits!(bf16, widen_bf16, narrow_bf16);
sixteen_bits!(f16, widen_f16, narrow_f16);

#[inline(always)]
fn widen_bf16(row: &[bf16], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(row) {
        *out = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}

#[inline(always)]
fn narrow_bf16(row: &[f32], out: &mut [MaybeUninit<bf16>]) {
    for (out, x) in out.iter_mut().zip(row) {
        out.write(bf16::from_bits(round_to_bf16(*x)));
    }
}

// The half crate converts slices of f16 with the processor's own instructions.
fn widen_f16(row: &[f16], out: &mut [f32]) {
    row.convert_to_f32_slice(out);
}

fn narrow_f16(row: &[f32], out: &mut [MaybeUninit<f16>]) {
    // In pieces through the stack, as that conversion wants initialised memory.
    let mut piece = [f16::ZERO; 64];
    for (row, out) in row.chunks(64).zip(out.chunks_mut(64)) {
        let piece = &mut piece[..row.len()];
        piece.convert_from_f32_slice(row);
        out.write_copy_of_slice(piece);
    }
}

/// Rounds to nearest even, without branches; a NaN stays one.
#[inline(always)]
fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
    if x.is_nan() {
        (bits >> 16) as u16 | 0x40
    } else {
        rounded
    }
}

/// `e^x` within 2 units in the last place, without branches: `x = n ln 2 + r`, a polynomial for `e^r` (Cephes).
/// Infinite above 88.37, zero below -87.33; a NaN stays one.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LOW: f32 = -87.33;
    const HIGH: f32 = 88.37;
    // Adding and taking away 1.5 * 2^23 rounds to an integer, left in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x < LOW { LOW } else { x };
    let clamped = if clamped > HIGH { HIGH } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    let y = p * power;
    let y = if x < LOW { 0.0 } else { y };
    if x > HIGH { f32::INFINITY } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -87.3 + i as f32 * (175.6 / 2_000_000.0);
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::from_bits((exact as f32).to_bits() + 1) - exact as f32);
            worst = worst.max((f64::from(exp_f32(x)) - exact).abs() / unit);
        }
        assert!(worst < 2.0, "{worst} units");
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(-1000.0), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(1000.0), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(round_to_bf16(x), bf16::from_f32(x).to_bits(), "{x}");
            }
        }
    }
}
