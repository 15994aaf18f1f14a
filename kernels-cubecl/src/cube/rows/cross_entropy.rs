//! Softmax cross entropy of each row in two kernels, between which ranks that hold other classes of the same rows can be
//! asked for theirs.

use burn::backend::{TensorMetadata, ops::FloatTensorOps};
use burn_cubecl::{CubeBackend, ops::into_data_sync, tensor::CubeTensor};
use burn_std::{Shape, TensorData};
use cubecl::{ir::ElemType, prelude::*};

use super::support::*;
use crate::{
    checks,
    cube::{
        exp::{exp, exp_each},
        launch::{elem, empty, into_contiguous},
    },
};

const OP: &str = "cross_entropy";

/// `[3, rows]`: largest logit, sum of exponentials of the distance from it, logit of the target.
///
/// Waits for the device once, as it reads the targets to refuse those out of range.
pub fn statistics(
    logits: CubeTensor,
    targets: CubeTensor,
    weights: CubeTensor,
    first: usize,
    total: usize,
) -> CubeTensor {
    let [rows, classes] = checks::cross_entropy(&logits, &targets, &weights, None);
    let [dtype, wide] = dtypes(OP, &logits);
    let [logits, targets, weights] = [logits, targets, weights].map(into_contiguous);
    let ignored = ignored(&weights);
    checks::cross_entropy_targets(integers(&targets).into_iter().zip(ignored.iter().copied()), total);
    if rows == 0 || classes == 0 {
        return without_classes(&weights, &ignored);
    }
    let statistics = empty(&logits, Shape::from([3, rows]), weights.dtype);
    let grid = Grid::new(&logits, rows, classes);
    let integer = elem(targets.dtype);
    // SAFETY: units beyond the last row or vector read the first row, and write nothing.
    unsafe {
        statistics_kernel::launch_unchecked(
            &statistics.client,
            grid.cubes(),
            grid.dim(),
            address(&[&logits]),
            grid.width,
            logits.into_buffer_arg(),
            targets.into_buffer_arg(),
            weights.into_buffer_arg(),
            statistics.clone().into_buffer_arg(),
            rows as u32,
            grid.vectors as u32,
            grid.steps() as u32,
            first as i32,
            InputScalar::new(f64::NEG_INFINITY, wide),
            [dtype, wide, integer],
        );
    }
    statistics
}

/// `weight * (softmax - onehot)`.
pub fn gradient(
    logits: CubeTensor,
    targets: CubeTensor,
    weights: CubeTensor,
    statistics: CubeTensor,
    first: usize,
) -> CubeTensor {
    let [rows, classes] = checks::cross_entropy(&logits, &targets, &weights, Some(&statistics));
    let [dtype, wide] = dtypes(OP, &logits);
    let dlogits = empty(&logits, logits.shape(), logits.dtype);
    if rows * classes == 0 {
        return dlogits;
    }
    let [logits, targets, weights, statistics] = [logits, targets, weights, statistics].map(into_contiguous);
    let width = width(&logits, classes);
    let units = rows * classes / width;
    let (cubes, dim) = elementwise(units);
    let integer = elem(targets.dtype);
    // SAFETY: a unit beyond the last vector does nothing.
    unsafe {
        gradient_kernel::launch_unchecked(
            &dlogits.client,
            cubes,
            dim,
            address(&[&logits]),
            width,
            logits.into_buffer_arg(),
            targets.into_buffer_arg(),
            weights.into_buffer_arg(),
            statistics.into_buffer_arg(),
            dlogits.clone().into_buffer_arg(),
            units as u32,
            rows as u32,
            (classes / width) as u32,
            first as i32,
            [dtype, wide, integer],
        );
    }
    dlogits
}

/// Which rows have weight 0.
fn ignored(weights: &CubeTensor) -> Vec<bool> {
    read(weights).iter::<f64>().map(|weight| weight == 0.0).collect()
}

/// Targets of any integer type.
fn integers(targets: &CubeTensor) -> Vec<i64> {
    assert!(
        targets.dtype.is_int() || targets.dtype.is_uint(),
        "cross_entropy: targets are {:?}, expected integers",
        targets.dtype
    );
    read(targets).iter::<i64>().collect()
}

fn read(tensor: &CubeTensor) -> TensorData {
    if tensor.meta.num_elements() == 0 {
        return TensorData::new(Vec::<f32>::new(), [0]);
    }
    into_data_sync(tensor.clone())
}

/// The statistics where there are no classes here.
fn without_classes(weights: &CubeTensor, ignored: &[bool]) -> CubeTensor {
    let part = |of_ignored: f64, other: f64| ignored.iter().map(move |&row| if row { of_ignored } else { other });
    let values: Vec<f64> = part(0.0, f64::NEG_INFINITY)
        .chain(part(1.0, 0.0))
        .chain(part(0.0, 0.0))
        .collect();
    let data = TensorData::new(values, [3, ignored.len()]);
    CubeBackend::float_from_data(data.convert_dtype(weights.dtype), &weights.device)
}

/// One pass over the row: a unit that meets a larger logit scales its sum so far.
#[cube(launch_unchecked, address_type = "dynamic")]
fn statistics_kernel<F: Float, A: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    targets: &[I],
    weights: &[A],
    statistics: &mut [A],
    rows: u32,
    vectors: u32,
    steps: u32,
    first: i32,
    negative_infinity: InputScalar,
    #[define(F, A, I)] _dtypes: [ElemType; 3],
) {
    let rows = rows as usize;
    let vectors = vectors as usize;
    // WGSL has no literal for it.
    let lowest = negative_infinity.get::<A>();
    let zero = A::from_int(0);
    let mut shared = Shared::<[A]>::new_slice(UNITS);

    let row = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let here = row < rows;
    let row = select(here, row, 0usize);
    // Not even looked at otherwise: an ignored row may hold infinities, and 0 times them is not 0.
    let counts = weights[row] != zero;
    let mut peak = lowest;
    let mut sum = zero;
    for step in 0..steps {
        let at = (UNIT_POS_X + step * CUBE_DIM_X) as usize;
        if counts && at < vectors {
            let values = Vector::<A, N>::cast_from(logits[row * vectors + at]);
            let mut top = peak;
            #[unroll]
            for lane in 0..N::value() {
                let value = values.extract(lane);
                top = select(value > top, value, top);
            }
            let shift = select(top == lowest, zero, top);
            let terms = exp_each::<A, N>(values - Vector::new(shift));
            sum = sum * exp::<A>(peak - shift) + terms.vector_sum();
            peak = top;
        }
    }
    let top = row_reduce::<A>(peak, &mut shared, true);
    let shift = select(top == lowest, zero, top);
    let sum = row_reduce::<A>(sum * exp::<A>(peak - shift), &mut shared, false);

    if here && UNIT_POS_X == 0 {
        if counts {
            let mut of_target = zero;
            let width = N::value() as i32;
            let column = i32::cast_from(targets[row]) - first;
            if column >= 0 && column < vectors as i32 * width {
                let values = logits[row * vectors + (column / width) as usize];
                #[unroll]
                for lane in 0..N::value() {
                    if column % width == lane as i32 {
                        of_target = A::cast_from(values.extract(lane));
                    }
                }
            }
            statistics[row] = top;
            statistics[rows + row] = sum;
            statistics[2 * rows + row] = of_target;
        } else {
            statistics[row] = zero;
            statistics[rows + row] = A::from_int(1);
            statistics[2 * rows + row] = zero;
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient_kernel<F: Float, A: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    targets: &[I],
    weights: &[A],
    statistics: &[A],
    dlogits: &mut [Vector<F, N>],
    units: u32,
    rows: u32,
    vectors: u32,
    first: i32,
    #[define(F, A, I)] _dtypes: [ElemType; 3],
) {
    if ABSOLUTE_POS >= units as usize {
        terminate!();
    }
    let vectors = vectors as usize;
    let row = ABSOLUTE_POS / vectors;
    let weight = weights[row];
    let mut gradient = Vector::<A, N>::zeroed();
    if weight != A::from_int(0) {
        let peak = statistics[row];
        let scale = weight / statistics[rows as usize + row];
        let values = Vector::<A, N>::cast_from(logits[ABSOLUTE_POS]);
        gradient = exp_each::<A, N>(values - Vector::new(peak)) * Vector::new(scale);
        let column = i32::cast_from(targets[row]) - first - (ABSOLUTE_POS % vectors * N::value()) as i32;
        #[unroll]
        for lane in 0..N::value() {
            if column == lane as i32 {
                gradient.insert(lane, gradient.extract(lane) - weight);
            }
        }
    }
    dlogits[ABSOLUTE_POS] = Vector::cast_from(gradient);
}
