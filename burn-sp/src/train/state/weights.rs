use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};

use super::plan::{burn_dtype, moment_of};
use super::{SavedState, StateError};

impl SavedState {
    /// The shape of a parameter, by its path in the module; none if the state has no such parameter.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.metadata.info(name).map(|info| info.shape.as_slice())
    }

    /// The module with the parameters of this state, whole, on the module's devices and in its dtypes: to use a model that was
    /// trained. Nothing of the optimizer is read.
    ///
    /// Not collective: before ranks start, [`launch_module`](crate::launch_module) brings the module to all of them.
    ///
    /// # Errors
    /// If the state lacks a parameter of the module or has one more, has it in another shape or dtype, or cannot be read.
    pub fn load_module<M: Module>(&mut self, module: M) -> Result<M, StateError> {
        let mut load = Load {
            state: self,
            path: Vec::new(),
            known: HashSet::new(),
            failed: None,
        };
        let module = module.map(&mut load);
        let (known, failed) = (load.known, load.failed);
        if let Some(error) = failed {
            return Err(error);
        }
        let mut parameters = self.metadata.offset_keys().into_iter();
        match parameters.find(|name| moment_of(name).is_none() && !known.contains(name)) {
            Some(name) => Err(StateError::Unknown {
                state: self.folder().display().to_string(),
                saved: self.shape(&name).unwrap_or_default().to_vec(),
                name,
            }),
            None => Ok(module),
        }
    }

    fn parameter(&mut self, name: String, model: &[usize]) -> Result<TensorData, StateError> {
        let state = self.folder().display().to_string();
        let Some(info) = self.metadata.info(&name).cloned() else {
            let model = model.to_vec();
            return Err(StateError::Lacking { state, name, model });
        };
        if info.shape != model {
            return Err(StateError::Shape {
                state,
                name,
                saved: info.shape,
                model: model.to_vec(),
            });
        }
        let Some(dtype) = burn_dtype(info.dtype) else {
            let dtype = format!("{:?}", info.dtype);
            return Err(StateError::Dtype { name, dtype });
        };
        Ok(TensorData::from_bytes_vec(self.bytes(&name)?, info.shape, dtype))
    }
}

struct Load<'a> {
    state: &'a mut SavedState,
    path: Vec<String>,
    /// The module's parameters.
    known: HashSet<String>,
    failed: Option<StateError>,
}

impl Load<'_> {
    /// None once something has failed.
    fn read(&mut self, shape: &[usize]) -> Option<TensorData> {
        if self.failed.is_some() {
            return None;
        }
        let name = self.path.join(".");
        self.known.insert(name.clone());
        match self.state.parameter(name, shape) {
            Ok(data) => Some(data),
            Err(error) => {
                self.failed = Some(error);
                None
            }
        }
    }
}

impl ModuleMapper for Load<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.read(&param.dims()) {
            Some(data) => param.map(|old| {
                let (tracked, device, dtype) = (old.is_require_grad(), old.device(), old.dtype());
                Tensor::from_data(data.convert_dtype(dtype), (&device, dtype)).set_require_grad(tracked)
            }),
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.read(&param.dims()) {
            Some(data) => param.map(|old| {
                let dtype = old.dtype();
                Tensor::from_data(data.convert_dtype(dtype), (&old.device(), dtype))
            }),
            None => param,
        }
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        match self.read(&param.dims()) {
            Some(data) => param.map(|old| Tensor::from_data(data, &old.device())),
            None => param,
        }
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}
