//! Ranks that are processes each build a model of their own; before they train it, it must be one.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_sp_comm::{Buffer, Collective, CommError, Communicator, Parts, Site, Transfer, raise};

/// The module with the parameters of rank 0, which all ranks of the group call with modules of the same shape.
pub(crate) fn of_first<M: Module>(module: M, group: &dyn Communicator, site: Site) -> M {
    if group.size() == 1 {
        return module;
    }
    let mut own = Shapes::default();
    module.visit(&mut own);
    own.compare(group, site);
    module.map(&mut FromFirst { group, site })
}

/// What rank 0 of the group has, on all its ranks.
pub(crate) fn buffer_of_first(own: Option<Buffer>, group: &dyn Communicator, site: Site) -> Buffer {
    let transfer = Transfer {
        op: Collective::Broadcast { root: 0 },
        buffer: own.unwrap_or_else(Buffer::empty),
    };
    match group.run(vec![transfer], site) {
        Ok(mut buffers) => buffers.remove(0),
        Err(error) => raise(error),
    }
}

/// What a model is, but for its numbers.
#[derive(Default)]
struct Shapes {
    parameters: u64,
    elements: u64,
    shapes: DefaultHasher,
}

impl Shapes {
    fn add(&mut self, shape: &[usize], dtype: DType) {
        self.parameters += 1;
        self.elements += shape.iter().product::<usize>() as u64;
        (shape, dtype).hash(&mut self.shapes);
    }

    /// Fails the run, with the same words on every rank, if a rank has another model.
    fn compare(&self, group: &dyn Communicator, site: Site) {
        let own = [self.parameters, self.elements, self.shapes.finish()];
        let transfer = Transfer {
            op: Collective::AllGather {
                dim: 0,
                parts: Parts::contiguous(3 * group.size(), group.size()),
            },
            buffer: Buffer::from_slice(&own, [3]),
        };
        let all = match group.run(vec![transfer], site) {
            Ok(buffers) => buffers[0].to_vec::<u64>(),
            Err(error) => raise(error),
        };
        let ranks: Vec<&[u64]> = all.chunks_exact(3).collect();
        let Some(other) = ranks.iter().position(|rank| *rank != ranks[0]) else {
            return;
        };
        let [here, there] = [ranks[0], ranks[other]];
        let how = match here[..2] == there[..2] {
            true => "of the same size, but of other shapes".into(),
            false => format!(
                "of {} parameters with {} elements, where rank 0 has {} with {}",
                there[0], there[1], here[0], here[1]
            ),
        };
        let message = format!("its model is another than that of rank 0: {how}; build the same on every rank");
        raise(CommError::failed(group.ranks()[other], message));
    }
}

impl ModuleVisitor for Shapes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(&param.val().dims(), param.val().dtype());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(&param.val().dims(), param.val().dtype());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(&param.val().dims(), param.val().dtype());
    }
}

struct FromFirst<'a> {
    group: &'a dyn Communicator,
    site: Site,
}

impl FromFirst<'_> {
    /// The numbers of rank 0, where this is another rank.
    fn data(&self, own: impl FnOnce() -> TensorData) -> Option<TensorData> {
        let first = self.group.rank() == 0;
        let own = first.then(|| {
            let (bytes, shape, dtype) = own().into_parts();
            Buffer::contiguous(bytes, shape.to_vec(), dtype).unwrap_or_else(|error| raise(error))
        });
        let buffer = buffer_of_first(own, self.group, self.site);
        if first {
            return None;
        }
        let (shape, dtype) = (buffer.shape().to_vec(), buffer.dtype());
        let bytes = buffer.into_bytes().unwrap_or_else(|error| raise(error));
        Some(TensorData::from_bytes(bytes, shape, dtype))
    }
}

impl ModuleMapper for FromFirst<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| match self.data(|| tensor.to_data()) {
            None => tensor,
            Some(data) => {
                let new = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
                if tensor.is_require_grad() {
                    new.require_grad()
                } else {
                    new
                }
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|tensor| match self.data(|| tensor.to_data()) {
            None => tensor,
            Some(data) => Tensor::from_data(data, (&tensor.device(), tensor.dtype())),
        })
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|tensor| match self.data(|| tensor.to_data()) {
            None => tensor,
            Some(data) => Tensor::from_data(data, (&tensor.device(), tensor.dtype())),
        })
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;
    use crate::{LaunchConfig, SpDevice, launch, layout::MeshShape};

    fn weights(module: &Linear) -> Vec<f32> {
        module.weight.val().into_data().try_to_vec().unwrap()
    }

    #[test]
    fn all_ranks_get_the_numbers_of_the_first() {
        let config = LaunchConfig::new(MeshShape::ulysses(3));
        let found = launch(&config, &Device::flex().autodiff(), |device: SpDevice| {
            // Each its own: the generator belongs to all threads.
            let own = LinearConfig::new(3, 2).init(device.device());
            let before = weights(&own);
            let module = of_first(own, device.mesh().world().as_ref(), Site::here());
            assert!(module.weight.val().is_require_grad());
            (before, weights(&module))
        });
        let found = found.unwrap();
        assert_ne!(found[0].0, found[1].0);
        assert!(found.iter().all(|(_, after)| *after == found[0].0));
    }

    #[test]
    fn another_model_is_named() {
        let config = LaunchConfig::new(MeshShape::ulysses(3));
        for (shape, how) in [
            ([3, 4], "of 2 parameters with 16 elements, where rank 0 has 2 with 8"),
            ([1, 4], "of the same size, but of other shapes"),
        ] {
            let error = launch(&config, &Device::flex(), |device: SpDevice| {
                let [input, output] = if device.rank() == 1 { shape } else { [3, 2] };
                let own: Linear = LinearConfig::new(input, output).init(device.device());
                of_first(own, device.mesh().world().as_ref(), Site::here());
            });
            let expected =
                format!("rank 1 failed: its model is another than that of rank 0: {how}; build the same on every rank");
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
    }
}
