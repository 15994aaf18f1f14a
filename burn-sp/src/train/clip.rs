use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_sp_comm::{Buffer, Collective, Communicator, Site, Transfer, raise};

use super::ParamLayouts;
use crate::layout::{Axis, Mesh};

/// Scales summed gradients so that their global norm, the root of the sum of all squares, is at most `max_norm`
/// (Pascanu et al., arXiv 1211.5063); returns them and the norm before scaling. Without a `max_norm` it only finds the
/// norm. Collective.
///
/// Each parameter counts once, however many ranks hold it. Squares are added in f64 in a fixed order, and every rank
/// uses rank 0's bits, so that replicated parameters stay equal bit for bit. A norm that is not finite leaves the
/// gradients alone; the caller sees it.
///
/// # Panics
/// If another rank does something else meanwhile (in a launched rank: every rank fails with a report).
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
///
/// launch(&LaunchConfig::new(MeshShape::ulysses(2)), &Device::flex(), |device: SpDevice| {
///     let linear = device.seeded(1, |device| LinearConfig::new(2, 1).with_bias(false).init(device));
///     let mut grads = GradientsParams::new();
///     grads.register(linear.weight.id, Tensor::<2>::from_floats([[3.0], [4.0]], device.device()));
///     let layouts = ParamLayouts::replicated();
///     let (grads, norm) = clip_by_global_norm(&linear, grads, Some(2.5), &layouts, device.mesh());
///     // Both ranks hold the weight, and it counts once.
///     assert_eq!(norm, 5.0);
///     let clipped = grads.get::<2>(linear.weight.id).unwrap();
///     assert_eq!(clipped.into_data().to_vec::<f32>().unwrap(), [1.5, 2.0]);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[track_caller]
pub fn clip_by_global_norm<M: Module>(
    module: &M,
    mut grads: GradientsParams,
    max_norm: Option<f64>,
    layouts: &ParamLayouts,
    mesh: &Mesh,
) -> (GradientsParams, f64) {
    let site = Site::here();
    let _span = tracing::trace_span!("clip").entered();
    let mut squares = Squares {
        grads: &grads,
        sums: BTreeMap::new(),
        layouts,
    };
    module.visit(&mut squares);
    let mut total = 0.0;
    for (axes, sum) in squares.sums {
        let axes: Vec<Axis> = axes.into_iter().filter(|axis| mesh.size(*axis) > 1).collect();
        total += if axes.is_empty() {
            sum
        } else {
            let comm = mesh.group(&axes).unwrap_or_else(|error| raise(error));
            exchange_f64(Collective::AllReduce, sum, comm.as_ref(), site)
        };
    }
    if mesh.world().size() > 1 {
        total = exchange_f64(Collective::Broadcast { root: 0 }, total, mesh.world().as_ref(), site);
    }
    let norm = total.sqrt();
    match max_norm {
        Some(max_norm) if norm.is_finite() && norm > max_norm => {
            module.visit(&mut Scale {
                grads: &mut grads,
                factor: max_norm / norm,
            });
        }
        _ => {}
    }
    (grads, norm)
}

/// One number through a collective.
pub(super) fn exchange_f64(op: Collective, value: f64, comm: &dyn Communicator, site: Site) -> f64 {
    let transfer = Transfer {
        op,
        buffer: Buffer::from_slice(&[value], vec![1]),
    };
    match comm.run(vec![transfer], site) {
        Ok(buffers) => buffers[0].to_vec::<f64>()[0],
        Err(error) => raise(error),
    }
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    /// By the axes that shard the parameter.
    sums: BTreeMap<Vec<Axis>, f64>,
    layouts: &'a ParamLayouts,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Also without a gradient: whether the ranks of these axes add up must not depend on what one of them has.
        let sum = self.sums.entry(self.layouts.sharded_axes(param.id)).or_default();
        if let Some(grad) = self.grads.get::<D>(param.id) {
            *sum += sum_of_squares(grad);
        }
    }
}

fn sum_of_squares<const D: usize>(tensor: Tensor<D>) -> f64 {
    let dtype = tensor.dtype();
    if tensor.dims().contains(&0) {
        return 0.0;
    }
    let tensor = if matches!(dtype, DType::F32 | DType::F64) {
        tensor
    } else {
        tensor.cast(DType::F32)
    };
    if !in_host_memory(&tensor.device()) {
        let sums: Vec<f64> = row_sums(tensor).into_data().iter::<f64>().collect();
        return sums.iter().sum();
    }
    let data = tensor.into_data();
    match dtype {
        DType::F64 => fixed_order(data.as_slice::<f64>().expect("the dtype is f64"), |x| x),
        _ => fixed_order(data.as_slice::<f32>().expect("the dtype is f32"), f64::from),
    }
}

fn in_host_memory(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    let host = *device == Device::flex();
    #[cfg(not(feature = "flex"))]
    let host = false;
    host
}

/// The squares of some thousand elements at a time, added up on the device, so that little has to leave it.
fn row_sums<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    const ROW: usize = 4096;
    let length = tensor.dims().iter().product::<usize>();
    let flat = tensor.reshape([length]);
    let squares = flat.clone() * flat;
    let rows = length / ROW;
    if rows == 0 {
        return squares.sum();
    }
    let sums = squares
        .clone()
        .narrow(0, 0, rows * ROW)
        .reshape([rows, ROW])
        .sum_dim(1)
        .reshape([rows]);
    match length % ROW {
        0 => sums,
        rest => Tensor::cat(vec![sums, squares.narrow(0, rows * ROW, rest).sum()], 0),
    }
}

/// Eight running sums, so that additions need not wait for each other; always the same eight.
fn fixed_order<T: Copy>(values: &[T], wide: impl Fn(T) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    let chunks = values.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            let value = wide(*value);
            *sum += value * value;
        }
    }
    for (sum, value) in sums.iter_mut().zip(rest) {
        let value = wide(*value);
        *sum += value * value;
    }
    sums.iter().sum()
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad.mul_scalar(self.factor));
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// Whole rows, less than one, and a rest: every element counts once.
    #[test]
    fn squares_added_in_rows_are_all_squares() {
        for length in [1, 4095, 4096, 4097, 3 * 4096, 10_000] {
            let tensor = Tensor::<1>::full([length], 2.0, &Device::flex()).reshape([length, 1]);
            let sums: Vec<f64> = row_sums(tensor).into_data().iter::<f64>().collect();
            assert_eq!(
                sums.len(),
                (length / 4096).max(1) + usize::from(length > 4096 && length % 4096 > 0)
            );
            assert_eq!(sums.iter().sum::<f64>(), 4.0 * length as f64);
        }
    }
}
