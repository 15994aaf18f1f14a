//! Adding up blocks of elements.

use burn_std::{bf16, f16};
use half::slice::HalfFloatSliceExt;

/// How elements of a dtype are added up: in which type, and how to get there and back.
pub(crate) trait Sum: Copy + Default {
    /// What the sum is kept in.
    type Acc: Copy + Default;

    /// `acc = values`
    fn load(acc: &mut [Self::Acc], values: &[Self]);

    /// `acc += values`
    fn add(acc: &mut [Self::Acc], values: &[Self]);

    /// `values = acc`, rounded
    fn store(values: &mut [Self], acc: &[Self::Acc]);
}

macro_rules! sum_in_its_own_type {
    ($add:expr; $($type:ty),*) => {$(
        impl Sum for $type {
            type Acc = $type;

            fn load(acc: &mut [$type], values: &[$type]) {
                acc.copy_from_slice(values);
            }

            fn add(acc: &mut [$type], values: &[$type]) {
                let add: fn($type, $type) -> $type = $add;
                acc.iter_mut().zip(values).for_each(|(acc, value)| *acc = add(*acc, *value));
            }

            fn store(values: &mut [$type], acc: &[$type]) {
                values.copy_from_slice(acc);
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

impl Sum for bf16 {
    type Acc = f32;

    fn load(acc: &mut [f32], values: &[bf16]) {
        acc.iter_mut().zip(values).for_each(|(acc, value)| *acc = widen(*value));
    }

    fn add(acc: &mut [f32], values: &[bf16]) {
        acc.iter_mut()
            .zip(values)
            .for_each(|(acc, value)| *acc += widen(*value));
    }

    fn store(values: &mut [bf16], acc: &[f32]) {
        values
            .iter_mut()
            .zip(acc)
            .for_each(|(value, acc)| *value = narrow(*acc));
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
    type Acc = f32;

    fn load(acc: &mut [f32], values: &[f16]) {
        values.convert_to_f32_slice(acc);
    }

    fn add(acc: &mut [f32], values: &[f16]) {
        // Conversion by the slice uses the hardware's instruction, one by one it does not.
        let mut wide = [0.0; 64];
        for (acc, values) in acc.chunks_mut(64).zip(values.chunks(64)) {
            let wide = &mut wide[..values.len()];
            values.convert_to_f32_slice(wide);
            acc.iter_mut().zip(wide).for_each(|(acc, value)| *acc += *value);
        }
    }

    fn store(values: &mut [f16], acc: &[f32]) {
        values.convert_from_f32_slice(acc);
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
