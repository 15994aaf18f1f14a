//! Between the products of backward.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    super::{
        call::{Call, OnDevice},
        draw::{Draw, stays},
        tile::{Numbers, Sizes, row_of},
    },
    block::{Block, Place, score},
};
use crate::{
    HeadMap,
    cube::{
        exp::exp,
        launch::{address, elem, elementwise, empty},
    },
};

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient_kernel<F: Float, A: Float>(
    scores: &Tensor<A>,
    grads: &Tensor<A>,
    row_numbers: &Tensor<A>,
    tables: &Tensor<u32>,
    weights: &mut Tensor<F>,
    score_grads: &mut Tensor<F>,
    sizes: Sizes,
    place: Place,
    numbers: Numbers,
    draw: Draw,
    #[comptime] mixed: bool,
    #[comptime] drops: bool,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at >= scores.len() {
        terminate!();
    }
    let (key, query) = (at % place.keys, at / place.keys % place.queries);
    let row = at / (place.keys * place.queries);
    let (batch, head) = (row / sizes.heads, row % sizes.heads);
    let (largest, log_sum, delta) = row_of::<A>(row_numbers, &sizes, batch, head, place.first_query + query);
    let zero = A::from_int(0);
    let score = score::<A>(scores[at], query, key, tables, &place, &numbers, mixed);
    let weight = exp::<A>(score - largest - log_sum);
    let mut left = weight;
    let mut grad = grads[at];
    if comptime!(drops) {
        let kept = numbers.kept.get::<A>();
        let (query, key) = (place.first_query + query, place.first_key + key);
        let stays = stays(&draw, tables, &sizes, batch, head, query, key);
        grad = select(stays, grad * kept, zero);
        left = select(stays, weight * kept, zero);
    }
    // By name: a weight of 0 times a hidden value might be NaN.
    let hidden = score == numbers.negative_infinity.get::<A>();
    weights[at] = F::cast_from(select(hidden, zero, left));
    score_grads[at] = F::cast_from(select(hidden, zero, weight * (grad - delta)));
}

/// From the products of queries with keys and of output gradients with values to weights (those dropout leaves) and
/// gradients of scores, both in the dtype of the inputs.
pub fn gradient(
    call: &Call,
    tables: &OnDevice,
    block: &Block,
    [scores, grads]: [CubeTensor; 2],
    row_numbers: &CubeTensor,
) -> [CubeTensor; 2] {
    let p = &call.problem;
    let shape = [p.batch * p.heads, block.len[0], block.len[1]];
    let results = [(); 2].map(|()| empty(&scores, shape, p.dtype));
    let [weights, score_grads] = results.each_ref().map(|result| result.clone().into_tensor_arg());
    let elements = scores.meta.num_elements();
    let client = scores.client.clone();
    let (cubes, dim) = elementwise(elements);
    // SAFETY: a unit past the last element ends at once, and the tables are those of these positions.
    unsafe {
        gradient_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            address(&[&scores]),
            scores.into_tensor_arg(),
            grads.into_tensor_arg(),
            row_numbers.clone().into_tensor_arg(),
            tables.words.clone().into_tensor_arg(),
            weights,
            score_grads,
            call.sizes(tables),
            block.argument(),
            call.numbers(),
            call.draw(tables),
            block.mixed(),
            call.drops(),
            [p.dtype, p.accumulator].map(elem),
        );
    }
    results
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn fold_kernel<A: Float>(
    part: &Tensor<A>,
    into: &mut Tensor<A>,
    first: usize,
    len: usize,
    part_heads: usize,
    ratio: usize,
    offset: usize,
    factor: InputScalar,
    elements: usize,
    #[define(A)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= elements {
        terminate!();
    }
    let (tokens, heads, width) = (into.shape(1), into.shape(2), into.shape(3));
    let (element, head) = (at % width, at / width % heads);
    let token = at / (width * heads) % len;
    let batch = at / (width * heads * len);
    // The heads of the part that belong to this one.
    let from = min(max(head * ratio, offset) - offset, part_heads);
    let to = min(max((head + 1) * ratio, offset) - offset, part_heads);
    let mut sum = A::from_int(0);
    for part_head in from..to {
        sum += part[((batch * part_heads + part_head) * len + token) * width + element];
    }
    into[((batch * tokens + first + token) * heads + head) * width + element] += sum * factor.get::<A>();
}

/// Adds a part `[batch * part heads, len, width]`, `factor` times, to the tokens from `first` on of `[batch, tokens, heads,
/// width]`; `map` says to which head each of the part's belongs.
pub fn fold(call: &Call, part: CubeTensor, into: &CubeTensor, first: usize, map: HeadMap, factor: f64) {
    let p = &call.problem;
    let [_, len, width] = part.meta.shape().dims();
    let elements = p.batch * len * into.meta.shape()[2] * width;
    let client = into.client.clone();
    let (cubes, dim) = elementwise(elements);
    // SAFETY: a unit past the last element ends at once, and the shapes are those of the call.
    unsafe {
        fold_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            address(&[&part, into]),
            part.into_tensor_arg(),
            into.clone().into_tensor_arg(),
            first,
            len,
            p.heads,
            map.ratio,
            map.offset,
            InputScalar::new(factor, elem(p.accumulator)),
            elements,
            elem(p.accumulator),
        );
    }
}
