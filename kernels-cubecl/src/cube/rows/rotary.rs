//! Rotary position embedding.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{ir::ElemType, prelude::*};

use super::support::*;
use crate::{
    RotaryStyle, checks,
    cube::launch::{empty, into_contiguous},
};

/// Turns the pairs of each head by the angles of its token, or back if `inverse`.
pub fn rotate(x: CubeTensor, cos: CubeTensor, sin: CubeTensor, style: RotaryStyle, inverse: bool) -> CubeTensor {
    let [_, tokens, heads, head_dim] = checks::rotary(&x, &cos, &sin);
    let dtypes = dtypes("rotary", &x);
    let y = empty(&x, x.shape(), x.dtype);
    let elements = x.meta.num_elements();
    if elements == 0 {
        return y;
    }
    let [x, cos, sin] = [x, cos, sin].map(into_contiguous);
    // How much of a row a unit loads at once: of a half of it, or of the whole with both elements of every pair.
    let (len, units) = match style {
        RotaryStyle::Halves => (head_dim / 2, elements / 2),
        RotaryStyle::Interleaved => (head_dim, elements),
    };
    let width = width(&x, len);
    let (cubes, dim) = elementwise(units / width);
    let sign = if inverse { -1.0 } else { 1.0 };
    // SAFETY: a unit beyond the last vector does nothing.
    unsafe {
        macro_rules! launch {
            ($kernel:ident) => {
                $kernel::launch_unchecked(
                    &y.client,
                    cubes,
                    dim,
                    address(&[&x]),
                    width,
                    x.into_buffer_arg(),
                    cos.into_buffer_arg(),
                    sin.into_buffer_arg(),
                    y.clone().into_buffer_arg(),
                    (units / width) as u32,
                    (len / width) as u32,
                    heads as u32,
                    tokens as u32,
                    sign,
                    dtypes,
                )
            };
        }
        match style {
            RotaryStyle::Halves => launch!(halves_kernel),
            RotaryStyle::Interleaved => launch!(interleaved_kernel),
        }
    }
    y
}

/// A unit for each vector of the first halves of the rows; `vectors` of them a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn halves_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[Vector<A, N>],
    sin: &[Vector<A, N>],
    y: &mut [Vector<F, N>],
    units: u32,
    vectors: u32,
    heads: u32,
    tokens: u32,
    sign: f32,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= units as usize {
        terminate!();
    }
    let vectors = vectors as usize;
    let row = ABSOLUTE_POS / vectors;
    let within = ABSOLUTE_POS % vectors;
    let angle = (row / heads as usize) % tokens as usize * vectors + within;
    let first = 2 * row * vectors + within;
    let cos = cos[angle];
    let sin = sin[angle] * Vector::cast_from(sign);
    let x0 = Vector::<A, N>::cast_from(x[first]);
    let x1 = Vector::<A, N>::cast_from(x[first + vectors]);
    y[first] = Vector::cast_from(x0 * cos - x1 * sin);
    y[first + vectors] = Vector::cast_from(x1 * cos + x0 * sin);
}

/// A unit for each vector of the rows, which holds whole pairs; `vectors` of them a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn interleaved_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[A],
    sin: &[A],
    y: &mut [Vector<F, N>],
    units: u32,
    vectors: u32,
    heads: u32,
    tokens: u32,
    sign: f32,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= units as usize {
        terminate!();
    }
    let vectors = vectors as usize;
    let value = Vector::<A, N>::cast_from(x[ABSOLUTE_POS]);
    let width = value.vector_size();
    let row = ABSOLUTE_POS / vectors;
    let within = ABSOLUTE_POS % vectors;
    let angle = ((row / heads as usize) % tokens as usize * vectors + within) * comptime![width / 2];
    let mut turned = Vector::<A, N>::zeroed();
    #[unroll]
    for pair in 0..comptime![width / 2] {
        let cos = cos[angle + pair];
        let sin = sin[angle + pair] * A::cast_from(sign);
        let x0 = value.extract(comptime![2 * pair]);
        let x1 = value.extract(comptime![2 * pair + 1]);
        turned.insert(comptime![2 * pair], x0 * cos - x1 * sin);
        turned.insert(comptime![2 * pair + 1], x1 * cos + x0 * sin);
    }
    y[ABSOLUTE_POS] = Vector::cast_from(turned);
}
