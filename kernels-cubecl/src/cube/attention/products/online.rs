//! The running softmax over blocks of keys.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    super::{
        call::{Call, OnDevice},
        draw::{Draw, stays},
        ln::ln,
        special::{is_finite, largest_of},
        tile::{Numbers, Sizes, UNITS},
    },
    block::{Block, Place, kv_row, score},
};
use crate::cube::{
    exp::exp,
    launch::{address, elem, elementwise, empty},
    reduce::row_reduce,
};

/// What is known of a block of queries after some of the keys.
pub struct State {
    /// Largest score, `[batch * heads, queries]`.
    pub largest: CubeTensor,
    /// Sum of the weights relative to it, likewise.
    pub sum: CubeTensor,
    /// Weighted sums of the values, `[batch * heads, queries, value_dim]`.
    pub out: CubeTensor,
}

/// A cube has a query of a head.
#[cube(launch_unchecked, address_type = "dynamic")]
fn online_kernel<F: Float, A: Float>(
    scores: &Tensor<A>,
    tables: &Tensor<u32>,
    weights: &mut Tensor<F>,
    largest_so_far: &mut Tensor<A>,
    sum_so_far: &mut Tensor<A>,
    shrink: &mut Tensor<A>,
    sizes: Sizes,
    place: Place,
    numbers: Numbers,
    draw: Draw,
    #[comptime] mixed: bool,
    #[comptime] drops: bool,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    let unit = UNIT_POS as usize;
    let (query, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let at = row * place.queries + query;
    let start = at * place.keys;
    let hidden = numbers.negative_infinity.get::<A>();
    let zero = A::from_int(0);
    let mut shared = Shared::<[A]>::new_slice(UNITS);

    let old = largest_so_far[at];
    let mut own = hidden;
    let mut key = unit;
    while key < place.keys {
        let score = score::<A>(scores[start + key], query, key, tables, &place, &numbers, mixed);
        own = select(score > own, score, own);
        key += UNITS;
    }
    let own = row_reduce::<A>(own, &mut shared, true);
    let largest = select(own > old, own, old);

    let mut sum = A::from_int(0);
    let mut key = unit;
    while key < place.keys {
        let score = score::<A>(scores[start + key], query, key, tables, &place, &numbers, mixed);
        let weight = select(score == hidden, zero, exp::<A>(score - largest));
        sum += weight;
        let mut left = weight;
        if comptime!(drops) {
            let (batch, head) = (row / sizes.heads, row % sizes.heads);
            let (query, key) = (place.first_query + query, place.first_key + key);
            let stays = stays(&draw, tables, &sizes, batch, head, query, key);
            left = select(stays, weight * numbers.kept.get::<A>(), zero);
        }
        weights[start + key] = F::cast_from(left);
        key += UNITS;
    }
    let sum = row_reduce::<A>(sum, &mut shared, false);
    if unit == 0 {
        let factor = select(largest > old && old != hidden, exp::<A>(old - largest), A::from_int(1));
        largest_so_far[at] = largest;
        sum_so_far[at] = sum_so_far[at] * factor + sum;
        shrink[at] = factor;
    }
}

/// Turns the products of queries and keys into weights relative to the largest score so far, in the dtype of the inputs, and
/// brings the statistics up to date. Also returns what the sums before shrink by, `[batch * heads, queries]`.
pub fn online(call: &Call, tables: &OnDevice, block: &Block, scores: CubeTensor, state: &State) -> [CubeTensor; 2] {
    let p = &call.problem;
    let rows = p.batch * p.heads;
    let weights = empty(&scores, [rows, block.len[0], block.len[1]], p.dtype);
    let shrink = empty(&scores, [rows, block.len[0]], p.accumulator);
    // SAFETY: each cube has a query of the block, and the tables are those of these positions.
    unsafe {
        online_kernel::launch_unchecked(
            &scores.client.clone(),
            CubeCount::Static(block.len[0] as u32, rows as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            address(&[&scores]),
            scores.into_tensor_arg(),
            tables.words.clone().into_tensor_arg(),
            weights.clone().into_tensor_arg(),
            state.largest.clone().into_tensor_arg(),
            state.sum.clone().into_tensor_arg(),
            shrink.clone().into_tensor_arg(),
            call.sizes(tables),
            block.argument(),
            call.numbers(),
            call.draw(tables),
            block.mixed(),
            call.drops(),
            [p.dtype, p.accumulator].map(elem),
        );
    }
    [weights, shrink]
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_kernel<F: Float, A: Float>(
    product: &Tensor<A>,
    shrink: &Tensor<A>,
    weights: &Tensor<F>,
    v: &Tensor<F>,
    infinite: &Tensor<u32>,
    out: &mut Tensor<A>,
    sizes: Sizes,
    place: Place,
    #[comptime] mixed: bool,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at >= out.len() {
        terminate!();
    }
    let (row, element) = (at / sizes.value_dim, at % sizes.value_dim);
    let mut sum = out[at] * shrink[row] + product[at];
    if comptime!(mixed) {
        let kv_row = kv_row(row / place.queries, &sizes);
        let words_at = kv_row * sizes.keys.div_ceil(32) + place.first_key / 32;
        for word in 0..place.keys.div_ceil(32) {
            let bits = infinite[words_at + word];
            if bits != 0 {
                for lane in 0..32u32 {
                    let key = word * 32 + lane as usize;
                    if (bits >> lane) & 1 == 1 && key < place.keys {
                        let weight = A::cast_from(weights[row * place.keys + key]);
                        if weight != A::from_int(0) {
                            let token = kv_row / sizes.kv_heads * sizes.keys + place.first_key + key;
                            let v_row = token * sizes.kv_heads + kv_row % sizes.kv_heads;
                            let value = A::cast_from(v[v_row * sizes.value_dim + element]);
                            // What is finite was in the product.
                            if !is_finite::<A>(value) {
                                sum += weight * value;
                            }
                        }
                    }
                }
            }
        }
    }
    out[at] = sum;
}

/// Adds the product of the weights and the values to the sums before, which shrink. In a block in which some pairs are
/// hidden, values that are not finite were left out of the product, and are added here to the queries that see them.
pub fn add(
    call: &Call,
    tables: &OnDevice,
    block: &Block,
    product: CubeTensor,
    [weights, shrink]: [CubeTensor; 2],
    [v, infinite]: [&CubeTensor; 2],
    out: &CubeTensor,
) {
    let p = &call.problem;
    let elements = out.meta.num_elements();
    let (cubes, dim) = elementwise(elements);
    // SAFETY: a unit past the last element ends at once, and the shapes are those of the call.
    unsafe {
        add_kernel::launch_unchecked(
            &out.client,
            cubes,
            dim,
            address(&[out, &weights, v]),
            product.into_tensor_arg(),
            shrink.into_tensor_arg(),
            weights.into_tensor_arg(),
            v.clone().into_tensor_arg(),
            infinite.clone().into_tensor_arg(),
            out.clone().into_tensor_arg(),
            call.sizes(tables),
            block.argument(),
            block.mixed(),
            [p.dtype, p.accumulator].map(elem),
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn finish_kernel<A: Float, O: Float>(
    largest_scores: &Tensor<A>,
    sums: &Tensor<A>,
    weighted: &Tensor<A>,
    out: &mut Tensor<O>,
    stats: &mut Tensor<A>,
    first: usize,
    len: usize,
    sizes: Sizes,
    numbers: Numbers,
    #[define(A, O)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at >= weighted.len() {
        terminate!();
    }
    let (row, element) = (at / sizes.value_dim, at % sizes.value_dim);
    let (head, query) = (row / len, first + row % len);
    let (largest, sum) = (largest_scores[row], sums[row]);
    let zero = A::from_int(0);
    let nothing = numbers.negative_infinity.get::<A>();
    // As in the kernel without products: a row that saw nothing stays 0, and a sum that is NaN makes the row NaN.
    let value = select(sum == zero, weighted[at], weighted[at] / sum);
    let token = head / sizes.heads * sizes.queries + query;
    out[(token * sizes.heads + head % sizes.heads) * sizes.value_dim + element] = O::cast_from(value);
    if element == 0 {
        let stats_row = head * sizes.queries + query;
        stats[stats_row] = largest_of::<A>(largest, sum, nothing);
        let plane = sizes.batches * sizes.heads * sizes.queries;
        stats[plane + stats_row] = select(sum == zero, zero, ln::<A>(sum));
    }
}

/// Writes output and statistics of the queries from `first` on.
pub fn finish(call: &Call, tables: &OnDevice, state: State, first: usize, [out, stats]: [&CubeTensor; 2]) {
    let elements = state.out.meta.num_elements();
    let len = state.out.meta.shape()[1];
    let (cubes, dim) = elementwise(elements);
    // SAFETY: a unit past the last element ends at once, and the shapes are those of the call.
    unsafe {
        finish_kernel::launch_unchecked(
            &out.client,
            cubes,
            dim,
            address(&[out, stats]),
            state.largest.into_tensor_arg(),
            state.sum.into_tensor_arg(),
            state.out.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            stats.clone().into_tensor_arg(),
            first,
            len,
            call.sizes(tables),
            call.numbers(),
            [call.problem.accumulator, out.dtype].map(elem),
        );
    }
}
