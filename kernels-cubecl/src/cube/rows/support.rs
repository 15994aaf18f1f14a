//! How rows are dealt to units.

use burn::backend::DType;
use burn_cubecl::{ops::numeric, tensor::CubeTensor};
use cubecl::{ir::ElemType, prelude::*};

use crate::{
    checks::accumulation,
    cube::launch::{elem, empty},
};

pub use crate::cube::{
    launch::{UNITS, address, cubes, elementwise},
    reduce::{column_sum, row_reduce},
};

/// Vectors that a unit keeps in registers; of longer rows it keeps them in memory of its own.
pub const REGISTERS: usize = 8;

/// The dtype of a tensor and the one that the kernel computes in.
///
/// # Panics
/// If the device has no such numbers.
pub fn dtypes(op: &str, x: &CubeTensor) -> [ElemType; 2] {
    assert!(
        matches!(x.dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16),
        "{op}: no kernel for {:?}, use F32, F64, BF16 or F16",
        x.dtype
    );
    let dtype = elem(x.dtype);
    assert!(
        x.client.properties().supports_type(dtype),
        "{op}: this device has no {:?}",
        x.dtype
    );
    [dtype, elem(accumulation(x.dtype))]
}

/// Elements that a unit loads at once from rows of `len` elements, all contiguous.
pub fn width(x: &CubeTensor, len: usize) -> usize {
    x.client
        .io_optimized_vector_sizes(x.dtype.size())
        .filter(|&width| width <= 4 && len.is_multiple_of(width))
        .max()
        .unwrap_or(1)
}

/// Zeros on the device of `like`.
pub fn zeros(like: &CubeTensor, shape: burn_std::Shape, dtype: DType) -> CubeTensor {
    if shape.num_elements() == 0 {
        return empty(like, shape, dtype);
    }
    numeric::zeros(like.device.clone(), shape, dtype)
}

/// How rows are dealt to units: `lanes` units a row, each with every `lanes`-th of its vectors, and `height` rows a cube.
#[derive(Clone, Copy)]
pub struct Grid {
    /// How many rows.
    pub rows: usize,
    /// Elements of a vector.
    pub width: usize,
    /// Vectors of a row.
    pub vectors: usize,
    /// Units of a row, a power of two.
    pub lanes: usize,
    /// Rows of a cube at a time, a power of two.
    pub height: usize,
}

impl Grid {
    /// For `rows` contiguous rows of `len` elements, neither of them 0.
    pub fn new(x: &CubeTensor, rows: usize, len: usize) -> Self {
        let width = width(x, len);
        let vectors = len / width;
        let lanes = vectors.div_ceil(REGISTERS / 2).next_power_of_two().min(UNITS);
        let height = (UNITS / lanes).min(rows.next_power_of_two());
        Self {
            rows,
            width,
            vectors,
            lanes,
            height,
        }
    }

    /// Vectors of a row that a unit handles.
    pub fn steps(&self) -> usize {
        self.vectors.div_ceil(self.lanes)
    }

    /// The shape of a cube.
    pub fn dim(&self) -> CubeDim {
        CubeDim::new_2d(self.lanes as u32, self.height as u32)
    }

    /// The cubes, if each handles `height` rows.
    pub fn cubes(&self) -> CubeCount {
        cubes(self.rows.div_ceil(self.height))
    }
}
