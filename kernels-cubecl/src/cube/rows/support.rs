//! How rows and elements are dealt to units, and sums over the units of a row.

use burn::backend::DType;
use burn_cubecl::{ops::numeric, tensor::CubeTensor};
use cubecl::{ir::ElemType, prelude::*};

use crate::{
    checks::accumulation,
    cube::launch::{elem, empty},
};

/// Units of a cube: what the smallest WebGPU device can do.
pub const UNITS: usize = 256;

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

/// The integers that address the largest of the tensors.
pub fn address(tensors: &[&CubeTensor]) -> AddressType {
    let largest = tensors.iter().map(|tensor| tensor.required_address_type()).max();
    largest.unwrap_or_default()
}

/// So many cubes, spread over two dimensions: each may have 65,535. There can be more than asked for.
pub fn cubes(count: usize) -> CubeCount {
    const MOST: usize = 65_535;
    let x = count.clamp(1, MOST);
    CubeCount::Static(x as u32, count.div_ceil(x) as u32, 1)
}

/// Cubes and their shape for `count` units that do not know of each other.
pub fn elementwise(count: usize) -> (CubeCount, CubeDim) {
    (cubes(count.div_ceil(UNITS)), CubeDim::new_1d(UNITS as u32))
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

/// The sum, or the largest, of the values of the units of a row; all units of the cube must come here.
#[cube]
pub fn row_reduce<A: Float>(value: A, shared: &mut Shared<[A]>, #[comptime] largest: bool) -> A {
    let at = UNIT_POS as usize;
    // The last result may still be read.
    sync_cube();
    shared[at] = value;
    sync_cube();
    let mut half = CUBE_DIM_X / 2;
    while half > 0 {
        if UNIT_POS_X < half {
            let own = shared[at];
            let other = shared[at + half as usize];
            if largest {
                shared[at] = select(other > own, other, own);
            } else {
                shared[at] = own + other;
            }
        }
        half /= 2;
        sync_cube();
    }
    shared[(UNIT_POS_Y * CUBE_DIM_X) as usize]
}

/// The sum of the vectors of the units that differ in y only, which unit 0 of them gets; all units of the cube must
/// come here.
#[cube]
pub fn column_sum<A: Float, N: Size>(value: Vector<A, N>, shared: &mut Shared<[Vector<A, N>]>) -> Vector<A, N> {
    let at = UNIT_POS as usize;
    // The last result may still be read.
    sync_cube();
    shared[at] = value;
    sync_cube();
    let mut half = CUBE_DIM_Y / 2;
    while half > 0 {
        if UNIT_POS_Y < half {
            let sum = shared[at] + shared[at + (half * CUBE_DIM_X) as usize];
            shared[at] = sum;
        }
        half /= 2;
        sync_cube();
    }
    shared[UNIT_POS_X as usize]
}
