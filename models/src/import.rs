//! Checkpoints: a model's parameters by the names that files have for them.

use std::collections::HashSet;
use std::fmt::Display;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use thiserror::Error;

/// Why a checkpoint is not one of a model, or cannot be made one.
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
    /// A tensor is of a dtype that is none of a checkpoint's floats.
    #[error("{name:?} is of {dtype}; a checkpoint can have F64, F32, F16 and BF16")]
    Dtype {
        /// The tensor's name.
        name: String,
        /// Its dtype.
        dtype: String,
    },
    /// It has more than the model.
    #[error("the model has no parameter for {0:?}; it has fewer layers, or is another kind of model")]
    Unused(String),
    /// A key of its configuration has a value that cannot be taken.
    #[error("{file}: {key} is {value}; {works}")]
    Setting {
        /// The configuration.
        file: String,
        /// The key.
        key: String,
        /// Its value, as JSON.
        value: String,
        /// What would work.
        works: String,
    },
    /// What is wrong with the tensors of a folder.
    #[error("{folder}: {problem}")]
    Tensors {
        /// The folder.
        folder: String,
        /// What is wrong.
        problem: Box<Self>,
    },
    /// A file or folder cannot be read or written, or is not what it should be.
    #[error("{path}: {why}")]
    File {
        /// The file or folder.
        path: String,
        /// Why, and what would work.
        why: String,
    },
    /// A model to be saved is not the one that its configuration describes.
    #[error(
        "the model's {path} is {found}, where the configuration makes it {expected}; put a model whose parameters ranks \
         share out together first (burn_sp::train::whole_module)"
    )]
    Model {
        /// The parameter's path in the model.
        path: String,
        /// Its shape, or "missing".
        found: String,
        /// The shape that it should have, or "missing".
        expected: String,
    },
}

impl ImportError {
    /// What is wrong with a file or folder.
    pub(crate) fn file(path: &Path, why: impl Display) -> Self {
        Self::File {
            path: path.display().to_string(),
            why: why.to_string(),
        }
    }

    /// With the folder whose tensors it is about.
    pub(crate) fn of(self, folder: &Path) -> Self {
        Self::Tensors {
            folder: folder.display().to_string(),
            problem: Box::new(self),
        }
    }
}

/// How a parameter lies in the tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As it is. Shapes may differ by 1s at the end.
    Same,
    /// As PyTorch has a linear layer's weight, `[outputs, inputs...]`.
    Transposed,
    /// It is one of so many equal parts of the last dimension.
    Part {
        /// Which.
        index: usize,
        /// Of how many.
        of: usize,
    },
}

impl Form {
    /// The shape of the tensor in which a parameter of this shape lies.
    pub fn shape(self, parameter: &[usize]) -> Vec<usize> {
        let mut shape = parameter.to_vec();
        match self {
            Self::Same => {}
            Self::Transposed => shape.reverse(),
            Self::Part { of, .. } => {
                if let Some(last) = shape.last_mut() {
                    *last *= of;
                }
            }
        }
        shape
    }
}

/// Where in a checkpoint a parameter is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The tensor's name.
    pub name: String,
    /// How the parameter lies in it.
    pub form: Form,
}

/// How Burn and safetensors call the floats that a checkpoint may have.
const FLOATS: [(Dtype, DType); 4] = [
    (Dtype::F64, DType::F64),
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
];

/// Burn's dtype for that of a file; none if it is no float.
pub(crate) fn from_file_dtype(dtype: Dtype) -> Option<DType> {
    FLOATS.iter().find(|(file, _)| *file == dtype).map(|(_, burn)| *burn)
}

/// A file's dtype for Burn's; none if it is no plain float.
pub(crate) fn to_file_dtype(dtype: DType) -> Option<Dtype> {
    FLOATS.iter().find(|(_, burn)| *burn == dtype).map(|(file, _)| *file)
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
    let place = |path: &str, dims: usize| Place {
        name: name(path).unwrap_or_else(|| path.to_owned()),
        form: if dims == 2 { Form::Transposed } else { Form::Same },
    };
    load_placed(model, files, place, |_| false, None)
}

/// [`load`] of a checkpoint in which the parameter at a path, of so many dimensions, is at this place; tensors that are
/// `ignored` need be no parameter. With a dtype, parameters have that, and those that are not drawn yet never are.
pub(crate) fn load_placed<M: Module>(
    model: M,
    files: &[SafeTensors<'_>],
    place: impl Fn(&str, usize) -> Place,
    ignored: impl Fn(&str) -> bool,
    dtype: Option<DType>,
) -> Result<M, ImportError> {
    let mut load = Load {
        files,
        place,
        dtype,
        path: Vec::new(),
        taken: HashSet::new(),
        error: None,
    };
    let model = model.map(&mut load);
    if let Some(error) = load.error {
        return Err(error);
    }
    let mut names = files.iter().flat_map(|file| file.names());
    match names.find(|name| !load.taken.contains(*name) && !ignored(name)) {
        Some(name) => Err(ImportError::Unused(name.to_owned())),
        None => Ok(model),
    }
}

/// The tensor of that name, in whichever file.
pub(crate) fn find<'a>(files: &'a [SafeTensors<'_>], name: &str) -> Option<TensorView<'a>> {
    files.iter().find_map(|file| file.tensor(name).ok())
}

struct Load<'a, P> {
    files: &'a [SafeTensors<'a>],
    place: P,
    dtype: Option<DType>,
    path: Vec<String>,
    taken: HashSet<String>,
    error: Option<ImportError>,
}

impl<P: Fn(&str, usize) -> Place> Load<'_, P> {
    /// The elements of a parameter of this shape; transposed if they lie so.
    fn read(&mut self, shape: &[usize]) -> Result<(TensorData, Form), ImportError> {
        let path = self.path.join(".");
        let Place { name, form } = (self.place)(&path, shape.len());
        let Some(view) = find(self.files, &name) else {
            return Err(ImportError::Missing { name, path });
        };
        let expected = form.shape(shape);
        let fits = match form {
            Form::Same => trimmed(view.shape()) == trimmed(&expected),
            // The kernel of a convolution over patches is that of a linear layer.
            Form::Transposed => {
                let (first, rest) = view.shape().split_first().unwrap_or((&0, &[]));
                [*first, rest.iter().product()] == *expected
            }
            Form::Part { .. } => view.shape() == expected,
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
        let Some(dtype) = from_file_dtype(view.dtype()) else {
            let dtype = format!("{:?}", view.dtype());
            return Err(ImportError::Dtype { name, dtype });
        };
        self.taken.insert(name);
        let (bytes, shape) = match form {
            Form::Part { index, of } => (part(view.data(), &expected, index, of), shape.to_vec()),
            _ => (view.data().to_vec(), expected),
        };
        Ok((TensorData::from_bytes_vec(bytes, shape, dtype), form))
    }
}

impl<P: Fn(&str, usize) -> Place> ModuleMapper for Load<'_, P> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        match self.read(param.lazy_shape().as_slice()) {
            Ok((data, form)) => {
                let (id, device) = (param.id, param.lazy_device());
                let dtype = self.dtype.unwrap_or_else(|| param.val().dtype());
                let data = data.convert_dtype(dtype);
                let data = match form {
                    // Through data: transposed, it would be a view.
                    Form::Transposed => Tensor::<2>::from_data(data, (&device, dtype)).transpose().into_data(),
                    _ => data,
                };
                param.transform_for_load(Tensor::from_data(data, (&device, dtype)), id)
            }
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

/// One of so many equal parts of the last dimension of a tensor.
fn part(bytes: &[u8], shape: &[usize], index: usize, of: usize) -> Vec<u8> {
    let rows: usize = shape.iter().rev().skip(1).product();
    let row = bytes.len() / rows.max(1);
    let (start, width) = (row / of * index, row / of);
    let rows = (0..rows).map(|number| &bytes[number * row + start..][..width]);
    rows.flatten().copied().collect()
}

/// A shape without the 1s at its end.
fn trimmed(shape: &[usize]) -> &[usize] {
    let len = shape.iter().rposition(|size| *size != 1).map_or(0, |last| last + 1);
    &shape[..len]
}
