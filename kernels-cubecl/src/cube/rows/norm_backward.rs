//! The gradients of both norms. A row is read once; what a cube's rows add to the gradients of weight and bias stays in
//! its units until its last row, and a second kernel adds up the cubes, in order.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Shape;
use cubecl::{ir::ElemType, prelude::*};

use super::support::*;
use crate::{
    checks,
    cube::launch::{empty, into_contiguous},
};

/// Rows whose weight gradients a cube adds up at least: what it writes of them is small beside the rows.
const ROWS_EACH: usize = 16;

/// Cubes that add up weight gradients at most.
const PARTS: usize = 512;

/// Columns of a cube that adds up the cubes' sums, and in how many parts it adds them.
const ADD: [u32; 2] = [32, 8];

/// Gradients of the input and of the weight, and of the bias if there is a mean.
pub fn backward(
    op: &str,
    x: CubeTensor,
    weight: CubeTensor,
    mean: Option<CubeTensor>,
    inverse: CubeTensor,
    grad: CubeTensor,
) -> (CubeTensor, CubeTensor, Option<CubeTensor>) {
    let dtypes = dtypes(op, &x);
    let (len, rows) = (checks::features(op, &x), checks::row_count(&x));
    let dx = empty(&x, x.shape(), x.dtype);
    let vector = Shape::from([len]);
    if x.meta.num_elements() == 0 {
        let zeros = || zeros(&x, vector.clone(), x.dtype);
        return (dx, zeros(), mean.map(|_| zeros()));
    }
    let [x, weight, inverse, grad] = [x, weight, inverse, grad].map(into_contiguous);
    let mean = mean.map(into_contiguous);
    let centred = mean.is_some();
    let grid = Grid::new(&x, rows, len);
    let (steps, dtype) = (grid.steps(), x.dtype);
    // The split depends on the shape alone, and so do the bits.
    let turns = rows.div_ceil(PARTS).max(ROWS_EACH).div_ceil(grid.height);
    let parts = rows.div_ceil(turns * grid.height);
    let kinds = if centred { 2 } else { 1 };
    let sums = empty(&x, Shape::from([parts, kinds, len]), inverse.dtype);
    // SAFETY: units beyond the last row or vector neither read nor write.
    unsafe {
        backward_kernel::launch_unchecked(
            &dx.client,
            cubes(parts),
            grid.dim(),
            address(&[&x]),
            grid.width,
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            mean.map(CubeTensor::into_buffer_arg).into(),
            inverse.into_buffer_arg(),
            grad.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            rows as u32,
            grid.vectors as u32,
            turns as u32,
            steps,
            dtypes,
        );
    }
    let total = |kind| {
        let out = empty(&sums, vector.clone(), dtype);
        let dim = CubeDim::new_2d(ADD[0], ADD[1]);
        // SAFETY: units beyond the last column neither read nor write.
        unsafe {
            add_kernel::launch_unchecked(
                &out.client,
                cubes(grid.vectors.div_ceil(ADD[0] as usize)),
                dim,
                address(&[&sums]),
                grid.width,
                sums.clone().into_buffer_arg(),
                out.clone().into_buffer_arg(),
                (kind * grid.vectors) as u32,
                (kinds * grid.vectors) as u32,
                grid.vectors as u32,
                parts as u32,
                dtypes,
            );
        }
        out
    };
    let (dweight, dbias) = (total(0), centred.then(|| total(1)));
    (dx, dweight, dbias)
}

/// With `n` the normalised row and `h = grad * weight`: `dx = (h - mean(h) - n * mean(h * n)) / std`, without `mean(h)`
/// where there is no mean, `dweight = sum(grad * n)` and `dbias = sum(grad)` over the rows.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    mean: ComptimeOption<&[A]>,
    inverse: &[A],
    grad: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    sums: &mut [Vector<A, N>],
    rows: u32,
    vectors: u32,
    turns: u32,
    #[comptime] steps: usize,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    let vectors = vectors as usize;
    let features = A::cast_from((vectors * N::value()) as u32);
    let centred = comptime![mean.is_some()];
    let mut shared = Shared::<[A]>::new_slice(UNITS);
    let mut shared_vectors = Shared::<[Vector<A, N>]>::new_slice(UNITS);
    let mut dweight = Array::<Vector<A, N>>::new(steps);
    let mut dbias = Array::<Vector<A, N>>::new(comptime![if centred { steps } else { 1 }]);
    let mut normalised = Array::<Vector<A, N>>::new(steps);
    let mut scaled = Array::<Vector<A, N>>::new(steps);

    for turn in 0..turns {
        let row = (CUBE_POS * turns as usize + turn as usize) * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
        let here = row < rows as usize;
        let row = select(here, row, 0usize);
        let inverse = inverse[row];
        let mut middle = A::from_int(0);
        #[comptime]
        match mean {
            ComptimeOption::Some(mean) => {
                middle = mean[row];
            }
            ComptimeOption::None => {}
        }
        let mut sum_h = Vector::<A, N>::zeroed();
        let mut sum_hn = Vector::<A, N>::zeroed();
        #[unroll(steps <= REGISTERS)]
        for step in 0..steps {
            let at = UNIT_POS_X as usize + step * CUBE_DIM_X as usize;
            if here && at < vectors {
                let n = (Vector::<A, N>::cast_from(x[row * vectors + at]) - Vector::new(middle)) * Vector::new(inverse);
                let grad = Vector::<A, N>::cast_from(grad[row * vectors + at]);
                let h = grad * Vector::cast_from(weight[at]);
                sum_hn += h * n;
                dweight[step] += grad * n;
                if centred {
                    sum_h += h;
                    dbias[step] += grad;
                }
                normalised[step] = n;
                scaled[step] = h;
            }
        }
        let mean_hn = row_reduce::<A>(sum_hn.vector_sum(), &mut shared, false) / features;
        let mut mean_h = A::from_int(0);
        if centred {
            mean_h = row_reduce::<A>(sum_h.vector_sum(), &mut shared, false) / features;
        }
        #[unroll(steps <= REGISTERS)]
        for step in 0..steps {
            let at = UNIT_POS_X as usize + step * CUBE_DIM_X as usize;
            if here && at < vectors {
                let slope = scaled[step] - Vector::new(mean_h) - normalised[step] * Vector::new(mean_hn);
                dx[row * vectors + at] = Vector::cast_from(slope * Vector::new(inverse));
            }
        }
    }

    let kinds = comptime![if centred { 2usize } else { 1usize }];
    #[unroll(steps <= REGISTERS)]
    for step in 0..steps {
        let at = UNIT_POS_X as usize + step * CUBE_DIM_X as usize;
        let sum = column_sum::<A, N>(dweight[step], &mut shared_vectors);
        if UNIT_POS_Y == 0 && at < vectors {
            sums[CUBE_POS * kinds * vectors + at] = sum;
        }
        if centred {
            let sum = column_sum::<A, N>(dbias[step], &mut shared_vectors);
            if UNIT_POS_Y == 0 && at < vectors {
                sums[(CUBE_POS * kinds + 1) * vectors + at] = sum;
            }
        }
    }
}

/// The sum of the `parts` vectors of each column, which lie `stride` apart, `first` before the first of them.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_kernel<F: Float, A: Float, N: Size>(
    sums: &[Vector<A, N>],
    out: &mut [Vector<F, N>],
    first: u32,
    stride: u32,
    columns: u32,
    parts: u32,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    let column = CUBE_POS * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    let here = column < columns as usize;
    let mut shared = Shared::<[Vector<A, N>]>::new_slice(UNITS);
    let mut sum = Vector::<A, N>::zeroed();
    if here {
        let mut part = UNIT_POS_Y;
        while part < parts {
            sum += sums[first as usize + part as usize * stride as usize + column];
            part += CUBE_DIM_Y;
        }
    }
    let total = column_sum::<A, N>(sum, &mut shared);
    if here && UNIT_POS_Y == 0 {
        out[column] = Vector::cast_from(total);
    }
}
