use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use burn_sp::train::ParamLayouts;
use burn_sp::{SpDevice, SpTensor};

/// A tensor read back, as f64: exact for every smaller float, so that equal values mean equal bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// The shape, in elements.
    pub shape: Vec<usize>,
    /// The dtype that the tensor had.
    pub dtype: DType,
    /// The elements, row-major.
    pub elements: Vec<f64>,
}

impl Values {
    /// Reads a tensor, of any shape.
    pub fn of<const D: usize>(tensor: &Tensor<D>) -> Self {
        Self::from(tensor.to_data())
    }

    /// The largest magnitude; 0 if there are no elements.
    pub fn peak(&self) -> f64 {
        self.elements.iter().fold(0.0, |peak, x| x.abs().max(peak))
    }

    /// Whether both have the same shape, dtype and bits.
    pub fn same_bits(&self, other: &Values) -> bool {
        let bits = |values: &Values| values.elements.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        self.shape == other.shape && self.dtype == other.dtype && bits(self) == bits(other)
    }
}

impl From<TensorData> for Values {
    fn from(data: TensorData) -> Self {
        Self {
            shape: data.shape().to_vec(),
            dtype: data.dtype(),
            elements: data.iter::<f64>().collect(),
        }
    }
}

/// Every float parameter of a module by its path, such as `blocks.0.mlp.up.weight`.
pub fn parameters_by_path<M: Module>(module: &M) -> BTreeMap<String, Values> {
    let mut collect = Collect::new(None);
    module.visit(&mut collect);
    collect.found
}

/// The gradients of a module's parameters by path; parameters without one are left out.
pub fn gradients_by_path<M: Module>(module: &M, grads: &GradientsParams) -> BTreeMap<String, Values> {
    let mut collect = Collect::new(Some(grads));
    module.visit(&mut collect);
    collect.found
}

/// The gradients, with those of sharded parameters made whole by their layouts. Collective.
///
/// # Panics
/// If another rank does something else meanwhile (in a launched rank: every rank fails with a report).
pub fn gather_gradients<M: Module>(
    module: &M,
    grads: GradientsParams,
    layouts: &ParamLayouts,
    device: &SpDevice,
) -> GradientsParams {
    let mut gather = Gather { grads, layouts, device };
    module.visit(&mut gather);
    gather.grads
}

/// Every float parameter by its path, those that are sharded made whole. Collective.
pub(crate) fn whole_parameters<M: Module>(
    module: &M,
    layouts: &ParamLayouts,
    device: &SpDevice,
) -> BTreeMap<String, Values> {
    let mut parameters = GradientsParams::new();
    module.visit(&mut Copy(&mut parameters));
    let whole = gather_gradients(module, parameters, layouts, device);
    gradients_by_path(module, &whole)
}

/// The paths of a module's float parameters, in the module's order.
pub(crate) fn parameter_paths<M: Module>(module: &M) -> Vec<String> {
    let mut paths = Paths::default();
    module.visit(&mut paths);
    paths.found
}

struct Copy<'a>(&'a mut GradientsParams);

impl ModuleVisitor for Copy<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.register(param.id, param.val().detach());
    }
}

#[derive(Default)]
struct Paths {
    path: Vec<String>,
    found: Vec<String>,
}

impl ModuleVisitor for Paths {
    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.found.push(self.path.join("."));
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

struct Gather<'a> {
    grads: GradientsParams,
    layouts: &'a ParamLayouts,
    device: &'a SpDevice,
}

impl ModuleVisitor for Gather<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(layout) = self.layouts.layout(param.id) else {
            return;
        };
        if let Some(own) = self.grads.remove::<D>(param.id) {
            let whole = SpTensor::from_local(own, layout.clone(), self.device).gather();
            self.grads.register(param.id, whole.into_local());
        }
    }
}

struct Collect<'a> {
    grads: Option<&'a GradientsParams>,
    path: Vec<String>,
    found: BTreeMap<String, Values>,
}

impl<'a> Collect<'a> {
    fn new(grads: Option<&'a GradientsParams>) -> Self {
        Self {
            grads,
            path: Vec::new(),
            found: BTreeMap::new(),
        }
    }
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.grads {
            Some(grads) => grads.get::<D>(param.id),
            None => Some(param.val()),
        };
        if let Some(tensor) = tensor {
            self.found.insert(self.path.join("."), Values::of(&tensor));
        }
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}
