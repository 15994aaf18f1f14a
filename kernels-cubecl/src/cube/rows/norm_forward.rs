//! Layer norm and root mean square norm over the last dimension, which are one kernel with and without a mean. A row is
//! read once and kept by the units that share it.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Shape;
use cubecl::{ir::ElemType, prelude::*};

use super::{
    dropout::{HostMask, Mask, MaskLaunch, drop_vector},
    support::*,
};
use crate::{
    DropoutSpec, checks,
    cube::launch::{empty, into_contiguous, two_in_one},
};

/// The result of a norm, and what its gradient needs to know of each row.
pub struct Normed {
    pub y: CubeTensor,
    /// Of layer norm only.
    pub mean: Option<CubeTensor>,
    /// One over the root of the mean square, or over the standard deviation.
    pub inverse: CubeTensor,
}

/// Layer norm if there is a bias, else root mean square norm, of `x`, or of `x` and something more:
/// `x + dropout(update)`, which is returned too.
pub fn forward(
    op: &str,
    x: CubeTensor,
    update: Option<(CubeTensor, Option<&DropoutSpec>)>,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    eps: f64,
) -> (Option<CubeTensor>, Normed) {
    let [dtype, wide] = dtypes(op, &x);
    let (len, rows) = (checks::features(op, &x), checks::row_count(&x));
    let (shape, centred) = (x.shape(), bias.is_some());
    let y = empty(&x, shape.clone(), x.dtype);
    let (statistics, mean, inverse, pitch) = statistics(&x, rows, centred);
    let sum = update.as_ref().map(|_| empty(&x, shape.clone(), x.dtype));
    let normed = Normed {
        y: y.clone(),
        mean,
        inverse,
    };
    if shape.num_elements() == 0 {
        return (sum, normed);
    }
    let [x, weight] = [x, weight].map(into_contiguous);
    let bias = bias.map(into_contiguous);
    let grid = Grid::new(&x, rows, len);
    let steps = grid.steps();
    let client = x.client.clone();
    let address = address(&[&x]);
    let bias = bias.map(CubeTensor::into_buffer_arg);
    let eps = InputScalar::new(eps, wide);
    // SAFETY: units beyond the last row or vector read the first row, and write nothing; the table of a mask has an
    // entry for every run.
    unsafe {
        match (update, sum.clone()) {
            (Some((update, dropout)), Some(sum)) => {
                let mask = dropout.and_then(|spec| HostMask::new(spec, shape.num_elements()));
                let drops = mask.is_some();
                let (runs, mask, in_blocks): (_, MaskLaunch, _) = match mask {
                    Some(mask) => mask.arguments(&x, grid.width),
                    None => (ComptimeOptionArgs::None, Mask::none(), false),
                };
                residual_kernel::launch_unchecked(
                    &client,
                    grid.cubes(),
                    grid.dim(),
                    address,
                    grid.width,
                    x.into_buffer_arg(),
                    into_contiguous(update).into_buffer_arg(),
                    runs,
                    mask,
                    weight.into_buffer_arg(),
                    bias.into(),
                    sum.into_buffer_arg(),
                    y.into_buffer_arg(),
                    statistics.into_buffer_arg(),
                    rows as u32,
                    grid.vectors as u32,
                    pitch as u32,
                    eps,
                    steps,
                    drops,
                    in_blocks,
                    [dtype, wide],
                );
            }
            _ => forward_kernel::launch_unchecked(
                &client,
                grid.cubes(),
                grid.dim(),
                address,
                grid.width,
                x.into_buffer_arg(),
                weight.into_buffer_arg(),
                bias.into(),
                y.into_buffer_arg(),
                statistics.into_buffer_arg(),
                rows as u32,
                grid.vectors as u32,
                pitch as u32,
                eps,
                steps,
                [dtype, wide],
            ),
        }
    }
    (sum, normed)
}

/// Room for the statistics of all rows: the whole, the mean in it if there is one, the other in it, and where that
/// starts. One buffer, as kernels may have no more than eight.
fn statistics(x: &CubeTensor, rows: usize, centred: bool) -> (CubeTensor, Option<CubeTensor>, CubeTensor, usize) {
    let dtype = checks::accumulation(x.dtype);
    if x.meta.num_elements() == 0 {
        let make = || zeros(x, Shape::from([rows]), dtype);
        return (make(), centred.then(make), make(), 0);
    }
    if !centred {
        let inverse = empty(x, Shape::from([rows]), dtype);
        return (inverse.clone(), None, inverse, 0);
    }
    let (whole, pitch, [mean, inverse]) = two_in_one(x, [[rows]; 2], dtype);
    (whole, Some(mean), inverse, pitch)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    bias: ComptimeOption<&[Vector<F, N>]>,
    y: &mut [Vector<F, N>],
    statistics: &mut [A],
    rows: u32,
    vectors: u32,
    pitch: u32,
    eps: InputScalar,
    #[comptime] steps: usize,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    let vectors = vectors as usize;
    let row = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let here = row < rows as usize;
    let row = select(here, row, 0usize);
    let mut kept = Array::<Vector<A, N>>::new(steps);
    #[unroll(steps <= REGISTERS)]
    for step in 0..steps {
        let at = UNIT_POS_X as usize + step * CUBE_DIM_X as usize;
        if at < vectors {
            kept[step] = Vector::cast_from(x[row * vectors + at]);
        }
    }
    normalise::<F, A, N>(
        &kept,
        weight,
        bias,
        y,
        statistics,
        row,
        here,
        vectors,
        pitch as usize,
        eps.get::<A>(),
        steps,
    );
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn residual_kernel<F: Float, A: Float, N: Size>(
    x: &[Vector<F, N>],
    update: &[Vector<F, N>],
    runs: ComptimeOption<&[u32]>,
    mask: &Mask,
    weight: &[Vector<F, N>],
    bias: ComptimeOption<&[Vector<F, N>]>,
    sum: &mut [Vector<F, N>],
    y: &mut [Vector<F, N>],
    statistics: &mut [A],
    rows: u32,
    vectors: u32,
    pitch: u32,
    eps: InputScalar,
    #[comptime] steps: usize,
    #[comptime] drops: bool,
    #[comptime] in_blocks: bool,
    #[define(F, A)] _dtypes: [ElemType; 2],
) {
    let vectors = vectors as usize;
    let row = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let here = row < rows as usize;
    let row = select(here, row, 0usize);
    let mut kept = Array::<Vector<A, N>>::new(steps);
    #[unroll(steps <= REGISTERS)]
    for step in 0..steps {
        let at = UNIT_POS_X as usize + step * CUBE_DIM_X as usize;
        if at < vectors {
            let at = row * vectors + at;
            let mut more = Vector::<A, N>::cast_from(update[at]);
            if drops {
                more = drop_vector::<A, N>(more, at as u32, runs, mask, in_blocks);
                // Rounded as the dropped tensor would be, if there were one.
                more = Vector::cast_from(Vector::<F, N>::cast_from(more));
            }
            let total = Vector::<F, N>::cast_from(Vector::<A, N>::cast_from(x[at]) + more);
            if here {
                sum[at] = total;
            }
            kept[step] = Vector::cast_from(total);
        }
    }
    normalise::<F, A, N>(
        &kept,
        weight,
        bias,
        y,
        statistics,
        row,
        here,
        vectors,
        pitch as usize,
        eps.get::<A>(),
        steps,
    );
}

/// Writes the output and the statistics of a row, given the vectors of it that this unit has.
///
/// Centres the row before it squares: `E[x^2] - E[x]^2` cancels when the mean is large.
#[cube]
#[allow(clippy::too_many_arguments)]
fn normalise<F: Float, A: Float, N: Size>(
    kept: &Array<Vector<A, N>>,
    weight: &[Vector<F, N>],
    bias: ComptimeOption<&[Vector<F, N>]>,
    y: &mut [Vector<F, N>],
    statistics: &mut [A],
    row: usize,
    here: bool,
    vectors: usize,
    pitch: usize,
    eps: A,
    #[comptime] steps: usize,
) {
    let features = A::cast_from((vectors * N::value()) as u32);
    let mut shared = Shared::<[A]>::new_slice(UNITS);
    let mut mean = A::from_int(0);
    if comptime![bias.is_some()] {
        // What lies behind the row's end is 0.
        let mut sum = Vector::<A, N>::zeroed();
        #[unroll(steps <= REGISTERS)]
        for step in 0..steps {
            sum += kept[step];
        }
        mean = row_reduce::<A>(sum.vector_sum(), &mut shared, false) / features;
    }
    let mut sum = Vector::<A, N>::zeroed();
    #[unroll(steps <= REGISTERS)]
    for step in 0..steps {
        let at = UNIT_POS_X as usize + step * CUBE_DIM_X as usize;
        if at < vectors {
            let distance = kept[step] - Vector::new(mean);
            sum += distance * distance;
        }
    }
    let mean_square = row_reduce::<A>(sum.vector_sum(), &mut shared, false) / features;
    let inverse = A::from_int(1) / (mean_square + eps).sqrt();
    if here {
        #[unroll(steps <= REGISTERS)]
        for step in 0..steps {
            let at = UNIT_POS_X as usize + step * CUBE_DIM_X as usize;
            if at < vectors {
                let normalised = (kept[step] - Vector::new(mean)) * Vector::new(inverse);
                let mut out = normalised * Vector::cast_from(weight[at]);
                #[comptime]
                match bias {
                    ComptimeOption::Some(bias) => {
                        out += Vector::cast_from(bias[at]);
                    }
                    ComptimeOption::None => {}
                }
                y[row * vectors + at] = Vector::cast_from(out);
            }
        }
        if UNIT_POS_X == 0 {
            if comptime![bias.is_some()] {
                statistics[row] = mean;
            }
            statistics[pitch + row] = inverse;
        }
    }
}
