//! What backward needs to know of each query.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::call::Call;
use crate::cube::launch::{address, elem, elementwise, empty};

#[cube(launch_unchecked, address_type = "dynamic")]
fn rows_kernel<O: Float, G: Float, A: Float>(
    out: &Tensor<O>,
    grad_out: &Tensor<G>,
    stats: &Tensor<A>,
    into: &mut Tensor<A>,
    queries: usize,
    heads: usize,
    width: usize,
    rows: usize,
    #[define(O, G, A)] _dtypes: [ElemType; 3],
) {
    let row = ABSOLUTE_POS;
    if row >= rows {
        terminate!();
    }
    // A row of the statistics is a query of a head; outputs have the heads within the queries.
    let query = row % queries;
    let head = row / queries % heads;
    let batch = row / (queries * heads);
    let start = ((batch * queries + query) * heads + head) * width;
    let mut delta = A::from_int(0);
    for i in start..start + width {
        delta += A::cast_from(out[i]) * A::cast_from(grad_out[i]);
    }
    into[row] = stats[row];
    into[rows + row] = stats[rows + row];
    into[2 * rows + row] = delta;
}

/// `[3, batch, heads, queries]`: the largest score of each query, the logarithm of the sum of its weights relative to it,
/// and the sum of its output times gradient (Dao et al., "FlashAttention", 2022, equation 4). One tensor, for the sake of
/// devices that let a kernel have few.
pub fn rows(call: &Call, out: CubeTensor, stats: CubeTensor, grad_out: CubeTensor) -> CubeTensor {
    let p = &call.problem;
    let count = p.batch * p.heads * p.queries;
    let into = empty(&out, [3, p.batch, p.heads, p.queries], p.accumulator);
    let client = out.client.clone();
    let (cubes, dim) = elementwise(count);
    let dtypes = [out.dtype, grad_out.dtype, p.accumulator].map(elem);
    // SAFETY: a unit past the last row ends at once, and the shapes were checked.
    unsafe {
        rows_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            address(&[&out, &grad_out, &into]),
            out.into_tensor_arg(),
            grad_out.into_tensor_arg(),
            stats.into_tensor_arg(),
            into.clone().into_tensor_arg(),
            p.queries,
            p.heads,
            p.value_dim,
            count,
            dtypes,
        );
    }
    into
}
