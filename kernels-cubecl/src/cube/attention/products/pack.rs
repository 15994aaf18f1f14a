//! From tensors with the heads within the tokens to the operands of matrix products.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::{special::is_finite, tile::UNITS};
use crate::{
    HeadMap,
    cube::launch::{address, elem, elementwise, empty},
};

#[cube(launch_unchecked, address_type = "dynamic")]
fn pack_kernel<I: Float, O: Float>(
    from: &Tensor<I>,
    into: &mut Tensor<O>,
    first: usize,
    len: usize,
    heads: usize,
    ratio: usize,
    offset: usize,
    #[comptime] clear: bool,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at >= into.len() {
        terminate!();
    }
    let width = from.shape(3);
    let row = at / width;
    let head = row / len;
    let from_token = head / heads * from.shape(1) + first + row % len;
    let from_head = (head % heads + offset) / ratio;
    let mut value = from[(from_token * from.shape(2) + from_head) * width + at % width];
    if comptime!(clear) {
        value = select(is_finite::<I>(value), value, I::from_int(0));
    }
    into[at] = O::cast_from(value);
}

/// Tokens `first..first + len` of a contiguous `[batch, tokens, .., width]` tensor as `[batch * heads, len, width]`, each
/// head that of `map`. With `clear`, elements that are not finite become 0.
pub fn pack(
    from: &CubeTensor,
    [first, len]: [usize; 2],
    heads: usize,
    map: HeadMap,
    dtype: DType,
    clear: bool,
) -> CubeTensor {
    let shape = from.meta.shape();
    let into = empty(from, [shape[0] * heads, len, shape[3]], dtype);
    let elements = into.meta.num_elements();
    let (cubes, dim) = elementwise(elements);
    // SAFETY: a unit past the last element ends at once; the head map was checked.
    unsafe {
        pack_kernel::launch_unchecked(
            &from.client,
            cubes,
            dim,
            address(&[from, &into]),
            from.clone().into_tensor_arg(),
            into.clone().into_tensor_arg(),
            first,
            len,
            heads,
            map.ratio,
            map.offset,
            clear,
            [from.dtype, dtype].map(elem),
        );
    }
    into
}

/// A cube looks at 32 keys of a head.
#[cube(launch_unchecked, address_type = "dynamic")]
fn infinite_kernel<F: Float>(v: &Tensor<F>, into: &mut Tensor<u32>, #[define(F)] _dtype: ElemType) {
    let (word, head, batch) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let (keys, heads, width) = (v.shape(1), v.shape(2), v.shape(3));
    let unit = UNIT_POS as usize;
    let key = word * 32 + unit % 32;
    let mut bits = 0u32.runtime();
    if key < keys {
        let mut element = unit / 32;
        while element < width {
            let value = v[((batch * keys + key) * heads + head) * width + element];
            bits |= select(is_finite::<F>(value), 0u32, 1u32 << (UNIT_POS % 32));
            element += comptime!(UNITS / 32);
        }
    }
    let mut all = Shared::<[u32]>::new_slice(UNITS);
    all[unit] = bits;
    sync_cube();
    if unit == 0 {
        let mut word_bits = 0u32.runtime();
        for i in 0..UNITS {
            word_bits |= all[i];
        }
        into[(batch * heads + head) * keys.div_ceil(32) + word] = word_bits;
    }
}

/// Which values have an element that is not finite: bits `[batch, kv_heads, keys / 32]`, the lowest of a word first.
pub fn infinite(v: &CubeTensor) -> CubeTensor {
    let [batch, keys, heads, _] = v.meta.shape().dims();
    let words = keys.div_ceil(32);
    let into = empty(v, [batch, heads, words], DType::U32);
    // SAFETY: keys past the last are not read, and each cube has a word to write.
    unsafe {
        infinite_kernel::launch_unchecked(
            &v.client,
            CubeCount::Static(words as u32, heads as u32, batch as u32),
            CubeDim::new_1d(UNITS as u32),
            address(&[v]),
            v.clone().into_tensor_arg(),
            into.clone().into_tensor_arg(),
            elem(v.dtype),
        );
    }
    into
}
