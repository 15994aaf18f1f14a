//! Gradients of keys and values without tensor cores: a cube for each tile of keys of a key/value head walks along the
//! queries that see them, head by head of those that read it. A tile has keys for rows here, and queries for columns.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    call::{Call, chunks},
    draw::{Draw, stays},
    tile::*,
};
use crate::cube::{
    exp::exp,
    launch::{address, elem, two_in_one},
};

#[cube(launch_unchecked, address_type = "dynamic")]
fn keys_kernel<F: Float, G: Float, A: Float, O: Float>(
    q: &Tensor<F>,
    k: &Tensor<F>,
    v: &Tensor<F>,
    grad_out: &Tensor<G>,
    row_numbers: &Tensor<A>,
    tables: &Tensor<u32>,
    both: &mut Tensor<O>,
    values_at: usize,
    sizes: Sizes,
    numbers: Numbers,
    draw: Draw,
    #[comptime] key_chunks: usize,
    #[comptime] value_chunks: usize,
    #[comptime] drops: bool,
    #[define(F, G, A, O)] _dtypes: [ElemType; 4],
) {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % SIDE, unit / SIDE);
    let (tile_row, kv_head, batch) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let first = tile_row * ROWS;
    let k_rows = rows(batch, first, sizes.keys, kv_head, sizes.kv_heads, sizes.head_dim, ROWS);
    let v_rows = rows(batch, first, sizes.keys, kv_head, sizes.kv_heads, sizes.value_dim, ROWS);

    let scale = numbers.scale.get::<A>();
    let infinite = numbers.negative_infinity.get::<A>();
    let zero = A::from_int(0);

    let mut tile = Shared::<[A]>::new_slice(ROWS * STRIDE);
    let mut staging = Shared::<[A]>::new_slice(STAGING);
    let mut own = Array::<A>::new(EACH);
    let mut grads = Array::<A>::new(EACH);
    let mut key_sums = Array::<A>::new(EACH * key_chunks);
    #[unroll(key_chunks <= 4)]
    for i in 0..EACH * key_chunks {
        key_sums[i] = zero;
    }
    let mut value_sums = Array::<A>::new(EACH * value_chunks);
    #[unroll(value_chunks <= 4)]
    for i in 0..EACH * value_chunks {
        value_sums[i] = zero;
    }

    // The local query heads that read this key/value head.
    let from = min(max(kv_head * sizes.ratio, sizes.offset) - sizes.offset, sizes.heads);
    let to = min(
        max((kv_head + 1) * sizes.ratio, sizes.offset) - sizes.offset,
        sizes.heads,
    );
    for head in from..to {
        for run in tables[tile_row]..tables[tile_row + 1] {
            let run_at = CUBE_COUNT_X as usize + 1 + 3 * run as usize;
            let pattern = tables[run_at + 2];
            for column in tables[run_at]..tables[run_at + 1] {
                let first_query = column as usize * COLUMNS;
                let q_rows = rows(
                    batch,
                    first_query,
                    sizes.queries,
                    head,
                    sizes.heads,
                    sizes.head_dim,
                    COLUMNS,
                );
                let grad_rows = rows(
                    batch,
                    first_query,
                    sizes.queries,
                    head,
                    sizes.heads,
                    sizes.value_dim,
                    COLUMNS,
                );
                scores::<F, F, A>(k, &k_rows, q, &q_rows, &mut staging, &mut own);
                scores::<F, G, A>(v, &v_rows, grad_out, &grad_rows, &mut staging, &mut grads);
                #[unroll]
                for j in 0..COLUMNS_EACH {
                    let column = x + j * SIDE;
                    let (largest, log_sum, delta) = row_of::<A>(row_numbers, &sizes, batch, head, first_query + column);
                    #[unroll]
                    for i in 0..ROWS_EACH {
                        let at = comptime!(i * COLUMNS_EACH + j);
                        let row = y + i * SIDE;
                        let bits = seen(tables, sizes.patterns_at, pattern, row);
                        let score = own[at] * scale;
                        let hidden = (bits >> column as u32) & 1 == 0 || score == infinite;
                        let weight = exp::<A>(score - largest - log_sum);
                        let mut left = weight;
                        let mut grad = grads[at];
                        if comptime!(drops) {
                            let kept = numbers.kept.get::<A>();
                            let stays = stays(&draw, tables, &sizes, batch, head, first_query + column, first + row);
                            grad = select(stays, grad * kept, zero);
                            left = select(stays, weight * kept, zero);
                        }
                        // By name: a weight of 0 times a hidden value might be NaN.
                        grads[at] = select(hidden, zero, weight * (grad - delta));
                        tile[row * STRIDE + column] = select(hidden, zero, left);
                    }
                }
                add_product::<G, A>(
                    &tile,
                    grad_out,
                    &grad_rows,
                    false,
                    &mut staging,
                    &mut value_sums,
                    value_chunks,
                    false,
                );
                #[unroll]
                for i in 0..ROWS_EACH {
                    #[unroll]
                    for j in 0..COLUMNS_EACH {
                        tile[(y + i * SIDE) * STRIDE + x + j * SIDE] = grads[comptime!(i * COLUMNS_EACH + j)];
                    }
                }
                add_product::<F, A>(&tile, q, &q_rows, false, &mut staging, &mut key_sums, key_chunks, true);
            }
        }
    }
    store::<O, A>(&key_sums, scale, both, &k_rows, key_chunks);
    store::<O, A>(
        &value_sums,
        A::from_int(1),
        both,
        &behind(&v_rows, values_at),
        value_chunks,
    );
}

/// The gradients of keys and values of a call that has queries, keys and heads.
pub fn keys(
    call: &Call,
    [q, k, v]: [CubeTensor; 3],
    grad_out: CubeTensor,
    row_numbers: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let p = &call.problem;
    let shapes = [p.head_dim, p.value_dim].map(|width| [p.batch, p.keys, p.kv_heads, width]);
    let (both, values_at, [dk, dv]) = two_in_one(&q, shapes, p.result_dtype());
    let tables = call.tables(&q, true, ROWS, COLUMNS);
    let dtypes = [p.dtype, grad_out.dtype, p.accumulator, both.dtype].map(elem);
    let cubes = CubeCount::Static(p.keys.div_ceil(ROWS) as u32, p.kv_heads as u32, p.batch as u32);
    // SAFETY: rows and elements past the end are not read or written, and the tables are those of these positions.
    unsafe {
        keys_kernel::launch_unchecked(
            &q.client.clone(),
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address(&[&q, &k, &v, &grad_out, &both]),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            grad_out.into_tensor_arg(),
            row_numbers.into_tensor_arg(),
            tables.words.clone().into_tensor_arg(),
            both.into_tensor_arg(),
            values_at,
            call.sizes(&tables),
            call.numbers(),
            call.draw(&tables),
            chunks(p.head_dim),
            chunks(p.value_dim),
            call.drops(),
            dtypes,
        );
    }
    (dk, dv)
}
