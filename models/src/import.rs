//! Checkpoints: a model's parameters by the names that files have for them.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use thiserror::Error;

/// Why a checkpoint is not one of a model.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ImportError {
    /// It has other names than those known.
    #[error("no tensor is called {0:?} (diffusers) or {1:?} (Wan); use a checkpoint of either")]
    Naming(String, String),
    /// Its configuration is of another kind of model.
    #[error("the configuration: {0}")]
    Config(String),
    /// It lacks a parameter.
    #[error(
        "the checkpoint has no {name:?}, which is the model's {path}; give all of its files, and its configuration"
    )]
    Missing {
        /// The tensor's name.
        name: String,
        /// The parameter's path in the model.
        path: String,
    },
    /// A parameter has another shape.
    #[error("{name:?} is {found:?}, but the model's {path} wants {expected:?}; check the configuration")]
    Shape {
        /// The tensor's name.
        name: String,
        /// The parameter's path in the model.
        path: String,
        /// The tensor's shape.
        found: Vec<usize>,
        /// The shape, as the checkpoint should have it.
        expected: Vec<usize>,
    },
    /// A tensor is of no float dtype that can be read.
    #[error("{name:?} is of {dtype}; F64, F32, F16 and BF16 can be read")]
    Dtype {
        /// The tensor's name.
        name: String,
        /// Its dtype.
        dtype: String,
    },
    /// It has more than the model.
    #[error("the model has no parameter for {0:?}; it has fewer layers, or is another kind of model")]
    Unused(String),
}

/// The model with the weights of a checkpoint, in the dtype that the model has. `name` says what the parameter at a path
/// is called there.
///
/// A matrix is a linear layer's weight, which lies transposed, `[outputs, inputs...]`. Shapes may differ by 1s at the end.
///
/// # Errors
/// If a parameter is missing, of another shape or dtype, or the files have a tensor that is no parameter.
pub(crate) fn load<M: Module>(
    model: M,
    files: &[SafeTensors<'_>],
    name: impl Fn(&str) -> Option<String>,
) -> Result<M, ImportError> {
    let mut load = Load {
        files,
        name,
        path: Vec::new(),
        taken: HashSet::new(),
        error: None,
    };
    let model = model.map(&mut load);
    if let Some(error) = load.error {
        return Err(error);
    }
    let mut names = files.iter().flat_map(|file| file.names());
    match names.find(|name| !load.taken.contains(*name)) {
        Some(name) => Err(ImportError::Unused(name.to_owned())),
        None => Ok(model),
    }
}

/// The tensor of that name, in whichever file.
pub(crate) fn find<'a>(files: &'a [SafeTensors<'_>], name: &str) -> Option<TensorView<'a>> {
    files.iter().find_map(|file| file.tensor(name).ok())
}

struct Load<'a, N> {
    files: &'a [SafeTensors<'a>],
    name: N,
    path: Vec<String>,
    taken: HashSet<String>,
    error: Option<ImportError>,
}

impl<N: Fn(&str) -> Option<String>> Load<'_, N> {
    /// The tensor of a parameter of this shape; of a linear layer as `[outputs, inputs]`.
    fn read(&mut self, shape: &[usize]) -> Result<TensorData, ImportError> {
        let path = self.path.join(".");
        let name = (self.name)(&path).unwrap_or_else(|| path.clone());
        let Some(view) = find(self.files, &name) else {
            return Err(ImportError::Missing { name, path });
        };
        let (expected, fits) = match *shape {
            // The kernel of a convolution over patches is that of a linear layer.
            [inputs, outputs] => {
                let (first, rest) = view.shape().split_first().unwrap_or((&0, &[]));
                let fits = (*first, rest.iter().product()) == (outputs, inputs);
                (vec![outputs, inputs], fits)
            }
            _ => (shape.to_vec(), trimmed(view.shape()) == trimmed(shape)),
        };
        if !fits {
            let found = view.shape().to_vec();
            return Err(ImportError::Shape {
                name,
                path,
                found,
                expected,
            });
        }
        let dtype = match view.dtype() {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => {
                let dtype = format!("{other:?}");
                return Err(ImportError::Dtype { name, dtype });
            }
        };
        self.taken.insert(name);
        Ok(TensorData::from_bytes_vec(view.data().to_vec(), expected, dtype))
    }
}

impl<N: Fn(&str) -> Option<String>> ModuleMapper for Load<'_, N> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        match self.read(param.dims().as_slice()) {
            Ok(data) => param.map(|old| {
                let (tracked, device, dtype) = (old.is_require_grad(), old.device(), old.dtype());
                let data = data.convert_dtype(dtype);
                let data = match D {
                    // Through data: transposed, it would be a view.
                    2 => Tensor::<2>::from_data(data, (&device, dtype)).transpose().into_data(),
                    _ => data,
                };
                Tensor::from_data(data, (&device, dtype)).set_require_grad(tracked)
            }),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// A shape without the 1s at its end.
fn trimmed(shape: &[usize]) -> &[usize] {
    let len = shape.iter().rposition(|size| *size != 1).map_or(0, |last| last + 1);
    &shape[..len]
}
