//! Gradients of the queries without tensor cores: a cube for each tile of queries of a head walks along the keys that it
//! sees.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    call::{Call, chunks},
    draw::{Draw, stays},
    tile::*,
};
use crate::cube::{
    exp::exp,
    launch::{address, elem, empty},
};

#[cube(launch_unchecked, address_type = "dynamic")]
fn queries_kernel<F: Float, G: Float, A: Float, O: Float>(
    q: &Tensor<F>,
    k: &Tensor<F>,
    v: &Tensor<F>,
    grad_out: &Tensor<G>,
    row_numbers: &Tensor<A>,
    tables: &Tensor<u32>,
    dq: &mut Tensor<O>,
    sizes: Sizes,
    numbers: Numbers,
    draw: Draw,
    #[comptime] chunks: usize,
    #[comptime] drops: bool,
    #[define(F, G, A, O)] _dtypes: [ElemType; 4],
) {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % SIDE, unit / SIDE);
    let (tile_row, head, batch) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let kv_head = (head + sizes.offset) / sizes.ratio;
    let first = tile_row * ROWS;
    let q_rows = rows(batch, first, sizes.queries, head, sizes.heads, sizes.head_dim, ROWS);
    let grad_rows = rows(batch, first, sizes.queries, head, sizes.heads, sizes.value_dim, ROWS);

    let scale = numbers.scale.get::<A>();
    let infinite = numbers.negative_infinity.get::<A>();
    let zero = A::from_int(0);

    let mut tile = Shared::<[A]>::new_slice(ROWS * STRIDE);
    let mut staging = Shared::<[A]>::new_slice(STAGING);
    let mut own = Array::<A>::new(EACH);
    let mut grads = Array::<A>::new(EACH);
    let mut sums = Array::<A>::new(EACH * chunks);
    #[unroll(chunks <= 4)]
    for i in 0..EACH * chunks {
        sums[i] = zero;
    }

    for run in tables[tile_row]..tables[tile_row + 1] {
        let run_at = CUBE_COUNT_X as usize + 1 + 3 * run as usize;
        let pattern = tables[run_at + 2];
        for column in tables[run_at]..tables[run_at + 1] {
            let first_key = column as usize * COLUMNS;
            let k_rows = rows(
                batch,
                first_key,
                sizes.keys,
                kv_head,
                sizes.kv_heads,
                sizes.head_dim,
                COLUMNS,
            );
            let v_rows = rows(
                batch,
                first_key,
                sizes.keys,
                kv_head,
                sizes.kv_heads,
                sizes.value_dim,
                COLUMNS,
            );
            scores::<F, F, A>(q, &q_rows, k, &k_rows, &mut staging, &mut own);
            scores::<G, F, A>(grad_out, &grad_rows, v, &v_rows, &mut staging, &mut grads);
            #[unroll]
            for i in 0..ROWS_EACH {
                let row = y + i * SIDE;
                let bits = seen(tables, sizes.patterns_at, pattern, row);
                let (largest, log_sum, delta) = row_of::<A>(row_numbers, &sizes, batch, head, first + row);
                #[unroll]
                for j in 0..COLUMNS_EACH {
                    let at = comptime!(i * COLUMNS_EACH + j);
                    let column = x + j * SIDE;
                    let score = own[at] * scale;
                    let weight = exp::<A>(score - largest - log_sum);
                    let mut grad = grads[at];
                    if comptime!(drops) {
                        let stays = stays(&draw, tables, &sizes, batch, head, first + row, first_key + column);
                        grad = select(stays, grad * numbers.kept.get::<A>(), zero);
                    }
                    // By name, not by a weight of 0 times the gradient, which a hidden value may have made NaN.
                    let hidden = (bits >> column as u32) & 1 == 0 || score == infinite;
                    tile[row * STRIDE + column] = select(hidden, zero, weight * (grad - delta));
                }
            }
            add_product::<F, A>(&tile, k, &k_rows, false, &mut staging, &mut sums, chunks, true);
        }
    }
    store::<O, A>(&sums, scale, dq, &q_rows, chunks);
}

/// The gradients of the queries of a call that has queries, keys and heads.
pub fn queries(call: &Call, [q, k, v]: [CubeTensor; 3], grad_out: CubeTensor, row_numbers: CubeTensor) -> CubeTensor {
    let p = &call.problem;
    let dq = empty(&q, [p.batch, p.queries, p.heads, p.head_dim], p.result_dtype());
    let tables = call.tables(&q, false, ROWS, COLUMNS);
    let dtypes = [p.dtype, grad_out.dtype, p.accumulator, dq.dtype].map(elem);
    let cubes = CubeCount::Static(p.queries.div_ceil(ROWS) as u32, p.heads as u32, p.batch as u32);
    // SAFETY: rows and elements past the end are not read or written, and the tables are those of these positions.
    unsafe {
        queries_kernel::launch_unchecked(
            &q.client.clone(),
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address(&[&q, &k, &v, &grad_out]),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            grad_out.into_tensor_arg(),
            row_numbers.into_tensor_arg(),
            tables.words.clone().into_tensor_arg(),
            dq.clone().into_tensor_arg(),
            call.sizes(&tables),
            call.numbers(),
            call.draw(&tables),
            chunks(p.head_dim),
            call.drops(),
            dtypes,
        );
    }
    dq
}
