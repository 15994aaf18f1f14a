//! Tile products, as safe functions on slices.

use gemm::Parallelism;

use super::real::Real;

/// A row-major matrix whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Matrix<'a, A> {
    pub data: &'a [A],
    pub stride: usize,
}

impl<'a, A> Matrix<'a, A> {
    pub fn new(data: &'a [A], stride: usize) -> Self {
        Self { data, stride }
    }

    /// The transposed matrix, for the product only.
    pub fn transposed(self) -> Operand<'a, A> {
        Operand {
            data: self.data,
            row: 1,
            column: self.stride,
        }
    }
}

/// A matrix as the product reads it.
#[derive(Clone, Copy)]
pub struct Operand<'a, A> {
    data: &'a [A],
    row: usize,
    column: usize,
}

impl<'a, A> From<Matrix<'a, A>> for Operand<'a, A> {
    fn from(matrix: Matrix<'a, A>) -> Self {
        Operand {
            data: matrix.data,
            row: matrix.stride,
            column: 1,
        }
    }
}

/// Whether a product replaces what was there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Store {
    Overwrite,
    Add,
}

/// `into (+)= factor * left * right`, where `shape` is (rows, columns, inner) and rows of `into` are `stride` apart.
///
/// Runs on the calling thread: the kernels divide their work above this level.
pub fn product<'a, A: Real>(
    shape: (usize, usize, usize),
    store: Store,
    into: &mut [A],
    stride: usize,
    factor: A,
    left: impl Into<Operand<'a, A>>,
    right: impl Into<Operand<'a, A>>,
) {
    let (rows, columns, inner) = shape;
    let (left, right) = (left.into(), right.into());
    let reach = |rows: usize, columns: usize, row: usize, column: usize| match rows.min(columns) {
        0 => 0,
        _ => (rows - 1) * row + (columns - 1) * column + 1,
    };
    assert!(columns <= stride && reach(rows, columns, stride, 1) <= into.len());
    assert!(reach(rows, inner, left.row, left.column) <= left.data.len());
    assert!(reach(inner, columns, right.row, right.column) <= right.data.len());
    // SAFETY: the three matrices lie within their slices, as just asserted; `into` is borrowed mutably, hence aliases
    // neither operand, and its rows do not overlap; `A` is f32 or f64.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            into.as_mut_ptr(),
            1,
            stride as isize,
            store == Store::Add,
            left.data.as_ptr(),
            left.column as isize,
            left.row as isize,
            right.data.as_ptr(),
            right.column as isize,
            right.row as isize,
            A::from_f64(1.0),
            factor,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
