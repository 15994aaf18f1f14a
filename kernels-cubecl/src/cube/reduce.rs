//! Sums over the units of a cube.

use cubecl::prelude::*;

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
