//! What the kernels without tensor cores share: a tile of the score matrix, worked on by one cube.
//!
//! A tile has 64 rows and 32 columns. The 256 units stand in a square of 16 by 16, and each has every sixteenth row and
//! column from its own on: four rows and two columns, eight numbers of the tile in registers. What others need goes
//! through two shared arrays, the tile itself and a staging area for the inputs: with two numbers a row just below the 16
//! KiB that WebGPU promises for f32.

use cubecl::prelude::*;

use super::{special::is_finite, tables::FULL};

/// Rows and columns of a tile.
pub const ROWS: usize = 64;
pub const COLUMNS: usize = 32;
/// Units along each side of the square.
pub const SIDE: usize = 16;
pub const UNITS: usize = SIDE * SIDE;
/// Rows and columns of a tile that one unit has.
pub const ROWS_EACH: usize = ROWS / SIDE;
pub const COLUMNS_EACH: usize = COLUMNS / SIDE;
pub const EACH: usize = ROWS_EACH * COLUMNS_EACH;
/// Distance between rows of the shared tile: one more than their length, so that a column is spread over the memory banks.
pub const STRIDE: usize = COLUMNS + 1;

/// Elements of a head that [`scores`] stages at once.
const CHUNK: usize = 16;
/// Room for a chunk of the rows of both factors, or for the columns of the factor that [`add_product`] stages.
pub const STAGING: usize = (ROWS + COLUMNS) * (CHUNK + 1);

/// The sizes of a call.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub struct Sizes {
    pub batches: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Of the [`HeadMap`](crate::HeadMap).
    pub ratio: usize,
    pub offset: usize,
    /// Where the patterns start in the tables.
    pub patterns_at: usize,
}

/// Constants of the accumulation type. Infinity is an argument because WGSL has no literal for it.
#[derive(CubeLaunch, CubeType)]
pub struct Numbers {
    pub scale: InputScalar,
    pub negative_infinity: InputScalar,
    /// By what dropout multiplies a weight that stays.
    pub kept: InputScalar,
}

/// Rows of one head, in a contiguous `[batch, tokens, heads, width]` tensor.
#[derive(CubeType, Clone, Copy)]
pub struct Rows {
    start: usize,
    stride: usize,
    width: usize,
    len: usize,
}

/// The rows of a head from token `first` on, at most `limit`.
#[cube]
pub fn rows(
    batch: usize,
    first: usize,
    tokens: usize,
    head: usize,
    heads: usize,
    width: usize,
    #[comptime] limit: usize,
) -> Rows {
    Rows {
        start: ((batch * tokens + first) * heads + head) * width,
        stride: heads * width,
        width,
        len: min(tokens - first, limit),
    }
}

/// The same rows, `offset` elements further on.
#[cube]
pub fn behind(rows: &Rows, offset: usize) -> Rows {
    Rows {
        start: rows.start + offset,
        stride: rows.stride,
        width: rows.width,
        len: rows.len,
    }
}

/// An element, or 0 past the last row or element.
#[cube]
fn load<F: Float, A: Float>(from: &Tensor<F>, rows: &Rows, row: usize, element: usize) -> A {
    let mut value = A::from_int(0);
    if row < rows.len && element < rows.width {
        value = A::cast_from(from[rows.start + row * rows.stride + element]);
    }
    value
}

/// The products of 64 rows of `a` with 32 of `b`: those of this unit. Ends with a barrier.
#[cube]
pub fn scores<F: Float, G: Float, A: Float>(
    a: &Tensor<F>,
    a_rows: &Rows,
    b: &Tensor<G>,
    b_rows: &Rows,
    staging: &mut Shared<[A]>,
    into: &mut Array<A>,
) {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % SIDE, unit / SIDE);
    let stride = comptime!(CHUNK + 1);
    let second = comptime!(ROWS * (CHUNK + 1));
    #[unroll]
    for i in 0..EACH {
        into[i] = A::from_int(0);
    }
    for chunk in 0..a_rows.width.div_ceil(CHUNK) {
        let element = chunk * CHUNK + x;
        #[unroll]
        for i in 0..ROWS_EACH {
            let row = y + i * SIDE;
            staging[row * stride + x] = load::<F, A>(a, a_rows, row, element);
        }
        #[unroll]
        for j in 0..COLUMNS_EACH {
            let row = y + j * SIDE;
            staging[second + row * stride + x] = load::<G, A>(b, b_rows, row, element);
        }
        sync_cube();
        for e in 0..CHUNK {
            #[unroll]
            for j in 0..COLUMNS_EACH {
                let factor = staging[second + (x + j * SIDE) * stride + e];
                #[unroll]
                for i in 0..ROWS_EACH {
                    into[i * COLUMNS_EACH + j] += staging[(y + i * SIDE) * stride + e] * factor;
                }
            }
        }
        sync_cube();
    }
}

/// Adds the product of the shared tile with 32 rows of `b`, which has `chunks` times 32 columns at most; a unit has the same
/// rows and columns of each 32 by 32 as of a tile. Begins and ends with a barrier.
///
/// Elements of `b` that are not finite would reach rows whose weight is 0, through 0 times NaN. With `clear` they count 0,
/// which is right where the weight shows that they are seen. Otherwise products with a weight of 0 are left out, in tiles
/// that are `mixed`.
#[cube]
pub fn add_product<F: Float, A: Float>(
    tile: &Shared<[A]>,
    b: &Tensor<F>,
    b_rows: &Rows,
    mixed: bool,
    staging: &mut Shared<[A]>,
    into: &mut Array<A>,
    #[comptime] chunks: usize,
    #[comptime] clear: bool,
) {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % SIDE, unit / SIDE);
    let zero = A::from_int(0);
    // Unrolled, the sums are in registers. Those of wide heads would be too many, and the code too long.
    #[unroll(chunks <= 4)]
    for chunk in 0..chunks {
        let column = unit % COLUMNS;
        #[unroll]
        for i in 0..COLUMNS * COLUMNS / UNITS {
            let row = unit / COLUMNS + i * (UNITS / COLUMNS);
            let mut value = load::<F, A>(b, b_rows, row, chunk * COLUMNS + column);
            if comptime!(clear) {
                value = select(is_finite::<A>(value), value, zero);
            }
            staging[row * STRIDE + column] = value;
        }
        sync_cube();
        if mixed {
            add_seen::<A>(tile, staging, x, y, into, chunk);
        } else {
            for key in 0..COLUMNS {
                #[unroll]
                for j in 0..COLUMNS_EACH {
                    let value = staging[key * STRIDE + x + j * SIDE];
                    #[unroll]
                    for i in 0..ROWS_EACH {
                        into[chunk * EACH + i * COLUMNS_EACH + j] += tile[(y + i * SIDE) * STRIDE + key] * value;
                    }
                }
            }
        }
        sync_cube();
    }
}

/// The product of a chunk without those whose weight is 0.
#[cube]
fn add_seen<A: Float>(
    tile: &Shared<[A]>,
    staging: &mut Shared<[A]>,
    x: usize,
    y: usize,
    into: &mut Array<A>,
    chunk: usize,
) {
    let zero = A::from_int(0);
    for key in 0..COLUMNS {
        #[unroll]
        for j in 0..COLUMNS_EACH {
            let value = staging[key * STRIDE + x + j * SIDE];
            #[unroll]
            for i in 0..ROWS_EACH {
                let weight = tile[(y + i * SIDE) * STRIDE + key];
                into[chunk * EACH + i * COLUMNS_EACH + j] += select(weight == zero, zero, weight * value);
            }
        }
    }
}

/// Writes a unit's numbers, multiplied by `factor`, to the rows of a result.
#[cube]
pub fn store<O: Float, A: Float>(
    from: &Array<A>,
    factor: A,
    into: &mut Tensor<O>,
    into_rows: &Rows,
    #[comptime] chunks: usize,
) {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % SIDE, unit / SIDE);
    #[unroll(chunks <= 4)]
    for chunk in 0..chunks {
        #[unroll]
        for j in 0..COLUMNS_EACH {
            let element = chunk * COLUMNS + x + j * SIDE;
            #[unroll]
            for i in 0..ROWS_EACH {
                let row = y + i * SIDE;
                if row < into_rows.len && element < into_rows.width {
                    let value = from[chunk * EACH + i * COLUMNS_EACH + j] * factor;
                    into[into_rows.start + row * into_rows.stride + element] = O::cast_from(value);
                }
            }
        }
    }
}

/// The bits of a row of a tile: which of its columns are seen.
#[cube]
pub fn seen(tables: &Tensor<u32>, patterns_at: usize, pattern: u32, row: usize) -> u32 {
    let mut bits = u32::MAX.runtime();
    if pattern != FULL {
        bits = tables[patterns_at + pattern as usize * ROWS + row];
    }
    bits
}

/// The numbers of a local query, from [`rows`](super::rows::rows): its largest score, the logarithm of its sum, the sum of
/// output times gradient. Past the end, those of the last query.
#[cube]
pub fn row_of<A: Float>(numbers: &Tensor<A>, sizes: &Sizes, batch: usize, head: usize, query: usize) -> (A, A, A) {
    let row = (batch * sizes.heads + head) * sizes.queries + min(query, sizes.queries - 1);
    let plane = sizes.batches * sizes.heads * sizes.queries;
    (numbers[row], numbers[plane + row], numbers[2 * plane + row])
}
