//! Two parts of an attention made one.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::ln::ln;
use crate::{
    cube::{
        exp::exp,
        launch::{address, elem, elementwise, empty, into_contiguous},
    },
    problem::check_merge,
};

/// A unit has an element of the output, and that of the first element writes the row's statistics.
#[cube(launch_unchecked, address_type = "dynamic")]
fn merge_kernel<A: Float>(
    out: &Tensor<A>,
    stats: &Tensor<A>,
    other_out: &Tensor<A>,
    other_stats: &Tensor<A>,
    merged_out: &mut Tensor<A>,
    merged_stats: &mut Tensor<A>,
    elements: usize,
    tokens: usize,
    heads: usize,
    width: usize,
    negative_infinity: InputScalar,
    #[define(A)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= elements {
        terminate!();
    }
    // An output has the heads within the tokens, statistics have the tokens within the heads.
    let element = at % width;
    let row = at / width;
    let token = row / heads % tokens;
    let number = (row / (heads * tokens) * heads + row % heads) * tokens + token;
    let rows = elements / width;

    let (own_largest, own_log) = (stats[number], stats[rows + number]);
    let (other_largest, other_log) = (other_stats[number], other_stats[rows + number]);
    let nothing = negative_infinity.get::<A>();
    let one = A::from_int(1);

    // Differences of large scores are exact, so that no digit of the logarithms is lost in them.
    let largest = select(own_largest > other_largest, own_largest, other_largest);
    let own = own_largest - largest + own_log;
    let other = other_largest - largest + other_log;
    let (high, low) = (select(own < other, other, own), select(own < other, own, other));
    // The weight of the smaller part relative to the larger, and its share.
    let weight = exp::<A>(low - high);
    let share = weight / (one + weight);
    let log = high + ln::<A>(one + weight);
    // From the larger share towards the smaller: equal parts stay what they are, to the bit.
    let (own_out, other_out) = (out[at], other_out[at]);
    let start = select(own < other, other_out, own_out);
    let end = select(own < other, own_out, other_out);
    let mixed = start + share * (end - start);

    // A part that saw nothing leaves the other's bits alone.
    let only_own = other_largest == nothing;
    let only_other = own_largest == nothing;
    let mixed = select(only_other, other_out, mixed);
    merged_out[at] = select(only_own, own_out, mixed);
    if element == 0 {
        let largest = select(only_other, other_largest, largest);
        let log = select(only_other, other_log, log);
        merged_stats[number] = select(only_own, own_largest, largest);
        merged_stats[rows + number] = select(only_own, own_log, log);
    }
}

/// See [`Kernels::attention_merge`](crate::Kernels::attention_merge).
pub fn merge(
    out: CubeTensor,
    stats: CubeTensor,
    other_out: CubeTensor,
    other_stats: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let ([batch, tokens, heads, width], dtype) = check_merge(&out, &stats, &other_out, &other_stats);
    let elements = batch * tokens * heads * width;
    if elements == 0 {
        return (out, stats);
    }
    let [out, stats, other_out, other_stats] = [out, stats, other_out, other_stats].map(into_contiguous);
    let merged_out = empty(&out, [batch, tokens, heads, width], dtype);
    let merged_stats = empty(&out, [2, batch, heads, tokens], dtype);
    let client = out.client.clone();
    let (cubes, dim) = elementwise(elements);
    // SAFETY: a unit past the last element ends at once, and the shapes were checked.
    unsafe {
        merge_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            address(&[&merged_out]),
            out.into_tensor_arg(),
            stats.into_tensor_arg(),
            other_out.into_tensor_arg(),
            other_stats.into_tensor_arg(),
            merged_out.clone().into_tensor_arg(),
            merged_stats.clone().into_tensor_arg(),
            elements,
            tokens,
            heads,
            width,
            InputScalar::new(f64::NEG_INFINITY, elem(dtype)),
            elem(dtype),
        );
    }
    (merged_out, merged_stats)
}
