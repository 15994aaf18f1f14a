//! Attention forward without tensor cores: a cube for each tile of queries of a head walks along the keys that it sees.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    call::{Call, chunks},
    draw::{Draw, stays},
    ln::ln,
    special::largest_of,
    tables::FULL,
    tile::*,
};
use crate::cube::{
    exp::exp,
    launch::{address, elem, empty},
};

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<F: Float, A: Float, O: Float>(
    q: &Tensor<F>,
    k: &Tensor<F>,
    v: &Tensor<F>,
    tables: &Tensor<u32>,
    out: &mut Tensor<O>,
    stats: &mut Tensor<A>,
    sizes: Sizes,
    numbers: Numbers,
    draw: Draw,
    #[comptime] chunks: usize,
    #[comptime] drops: bool,
    #[define(F, A, O)] _dtypes: [ElemType; 3],
) {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % SIDE, unit / SIDE);
    let (tile_row, head, batch) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let kv_head = (head + sizes.offset) / sizes.ratio;
    let first = tile_row * ROWS;
    let q_rows = rows(batch, first, sizes.queries, head, sizes.heads, sizes.head_dim, ROWS);

    let scale = numbers.scale.get::<A>();
    let hidden = numbers.negative_infinity.get::<A>();
    let zero = A::from_int(0);
    let one = A::from_int(1);

    let mut tile = Shared::<[A]>::new_slice(ROWS * STRIDE);
    let mut staging = Shared::<[A]>::new_slice(STAGING);
    // For each row: the largest score so far, and by what the sums before shrink when there is a larger one.
    let mut largest = Shared::<[A]>::new_slice(ROWS);
    let mut shrink = Shared::<[A]>::new_slice(ROWS);
    let mut own = Array::<A>::new(EACH);
    let mut sums = Array::<A>::new(EACH * chunks);
    #[unroll(chunks <= 4)]
    for i in 0..EACH * chunks {
        sums[i] = zero;
    }
    // Of the weights of row `unit`.
    let mut sum = A::from_int(0);
    if unit < ROWS {
        largest[unit] = hidden;
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
            #[unroll]
            for i in 0..ROWS_EACH {
                let row = y + i * SIDE;
                let bits = seen(tables, sizes.patterns_at, pattern, row);
                #[unroll]
                for j in 0..COLUMNS_EACH {
                    let at = comptime!(i * COLUMNS_EACH + j);
                    let column = x + j * SIDE;
                    own[at] = select((bits >> column as u32) & 1 == 1, own[at] * scale, hidden);
                    tile[row * STRIDE + column] = own[at];
                }
            }
            sync_cube();

            if unit < ROWS {
                let old = largest[unit];
                let mut new = old;
                for j in 0..COLUMNS {
                    let score = tile[unit * STRIDE + j];
                    new = select(score > new, score, new);
                }
                largest[unit] = new;
                shrink[unit] = select(new > old && old != hidden, exp::<A>(old - new), one);
            }
            sync_cube();

            #[unroll]
            for i in 0..ROWS_EACH {
                let row = y + i * SIDE;
                #[unroll]
                for j in 0..COLUMNS_EACH {
                    let at = comptime!(i * COLUMNS_EACH + j);
                    let weight = exp::<A>(own[at] - largest[row]);
                    own[at] = select(own[at] == hidden, zero, weight);
                    tile[row * STRIDE + x + j * SIDE] = own[at];
                }
                #[unroll(chunks <= 4)]
                for chunk in 0..chunks {
                    #[unroll]
                    for j in 0..COLUMNS_EACH {
                        sums[chunk * EACH + i * COLUMNS_EACH + j] *= shrink[row];
                    }
                }
            }
            sync_cube();

            if unit < ROWS {
                sum *= shrink[unit];
                let mut added = A::from_int(0);
                for j in 0..COLUMNS {
                    added += tile[unit * STRIDE + j];
                }
                sum += added;
            }
            if comptime!(drops) {
                let kept = numbers.kept.get::<A>();
                sync_cube();
                #[unroll]
                for i in 0..ROWS_EACH {
                    let row = y + i * SIDE;
                    #[unroll]
                    for j in 0..COLUMNS_EACH {
                        let column = x + j * SIDE;
                        let stays = stays(&draw, tables, &sizes, batch, head, first + row, first_key + column);
                        let weight = own[comptime!(i * COLUMNS_EACH + j)] * kept;
                        tile[row * STRIDE + column] = select(stays, weight, zero);
                    }
                }
            }
            let mixed = pattern != FULL;
            add_product::<F, A>(&tile, v, &v_rows, mixed, &mut staging, &mut sums, chunks, false);
        }
    }

    if unit < ROWS {
        // A row that saw nothing stays 0, its maximum negative infinity and its logarithm 0. A sum that is NaN makes the row
        // NaN, even if dropout took the weights that are.
        shrink[unit] = select(sum == zero, one, one / sum);
        if first + unit < sizes.queries {
            let row = (batch * sizes.heads + head) * sizes.queries + first + unit;
            stats[row] = largest_of::<A>(largest[unit], sum, hidden);
            let rows = sizes.batches * sizes.heads * sizes.queries;
            stats[rows + row] = select(sum == zero, zero, ln::<A>(sum));
        }
    }
    sync_cube();
    #[unroll(chunks <= 4)]
    for chunk in 0..chunks {
        #[unroll]
        for i in 0..ROWS_EACH {
            #[unroll]
            for j in 0..COLUMNS_EACH {
                sums[chunk * EACH + i * COLUMNS_EACH + j] *= shrink[y + i * SIDE];
            }
        }
    }
    let out_rows = rows(batch, first, sizes.queries, head, sizes.heads, sizes.value_dim, ROWS);
    store::<O, A>(&sums, one, out, &out_rows, chunks);
}

/// Output and statistics of a call that has queries and heads.
pub fn forward(call: &Call, [q, k, v]: [CubeTensor; 3]) -> (CubeTensor, CubeTensor) {
    let p = &call.problem;
    let out = empty(&q, [p.batch, p.queries, p.heads, p.value_dim], p.result_dtype());
    let stats = empty(&q, [2, p.batch, p.heads, p.queries], p.accumulator);
    let tables = call.tables(&q, false, ROWS, COLUMNS);
    // Without keys there are no runs, and whatever is there in their place is not read.
    let [k, v] = if p.keys == 0 { [q.clone(), q.clone()] } else { [k, v] };
    let cubes = CubeCount::Static(p.queries.div_ceil(ROWS) as u32, p.heads as u32, p.batch as u32);
    // SAFETY: rows and elements past the end are not read or written, and the tables are those of these positions.
    unsafe {
        forward_kernel::launch_unchecked(
            &q.client.clone(),
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address(&[&q, &k, &v, &out]),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            tables.words.clone().into_tensor_arg(),
            out.clone().into_tensor_arg(),
            stats.clone().into_tensor_arg(),
            call.sizes(&tables),
            call.numbers(),
            call.draw(&tables),
            chunks(p.value_dim),
            call.drops(),
            [elem(p.dtype), elem(p.accumulator), elem(out.dtype)],
        );
    }
    (out, stats)
}
