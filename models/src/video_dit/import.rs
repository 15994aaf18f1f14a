use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use thiserror::Error;

use super::VideoDit;

/// Under which names a checkpoint has a model's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Those of Hugging Face's diffusers.
    Diffusers,
    /// Those of Wan's own code.
    Wan,
}

/// Why a checkpoint is not one of a model.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ImportError {
    /// It has other names than those known.
    #[error("no tensor is called {0:?} (diffusers) or {1:?} (Wan); use a checkpoint of either")]
    Naming(String, String),
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

/// Module by module: the path in the model, or in a block, and the names that diffusers and Wan have for it.
const MODULES: [(&str, [&str; 2]); 22] = [
    ("patch", ["patch_embedding", "patch_embedding"]),
    (
        "time.first",
        ["condition_embedder.time_embedder.linear_1", "time_embedding.0"],
    ),
    (
        "time.second",
        ["condition_embedder.time_embedder.linear_2", "time_embedding.2"],
    ),
    ("time.projection", ["condition_embedder.time_proj", "time_projection.1"]),
    (
        "text.first",
        ["condition_embedder.text_embedder.linear_1", "text_embedding.0"],
    ),
    (
        "text.second",
        ["condition_embedder.text_embedder.linear_2", "text_embedding.2"],
    ),
    ("head.output", ["proj_out", "head.head"]),
    ("attention.query", ["attn1.to_q", "self_attn.q"]),
    ("attention.key", ["attn1.to_k", "self_attn.k"]),
    ("attention.value", ["attn1.to_v", "self_attn.v"]),
    ("attention.output", ["attn1.to_out.0", "self_attn.o"]),
    ("attention.query_norm", ["attn1.norm_q", "self_attn.norm_q"]),
    ("attention.key_norm", ["attn1.norm_k", "self_attn.norm_k"]),
    // Diffusers counts the norms in another order than Wan.
    ("text_norm", ["norm2", "norm3"]),
    ("text_attention.query", ["attn2.to_q", "cross_attn.q"]),
    ("text_attention.key", ["attn2.to_k", "cross_attn.k"]),
    ("text_attention.value", ["attn2.to_v", "cross_attn.v"]),
    ("text_attention.output", ["attn2.to_out.0", "cross_attn.o"]),
    ("text_attention.query_norm", ["attn2.norm_q", "cross_attn.norm_q"]),
    ("text_attention.key_norm", ["attn2.norm_k", "cross_attn.norm_k"]),
    ("mlp.up", ["ffn.net.0.proj", "ffn.0"]),
    ("mlp.down", ["ffn.net.2", "ffn.2"]),
];

impl Naming {
    /// The name of the tensor that the parameter at a path of [`VideoDit`] is, `blocks.0.mlp.up.weight` say; none if there
    /// is no such parameter. Weights of linear layers lie transposed, `[outputs, inputs...]`.
    pub fn tensor(self, path: &str) -> Option<String> {
        let pick = |names: [&'static str; 2]| names[usize::from(self == Naming::Wan)];
        let (block, path) = match path.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
            Some((number, rest)) => (format!("blocks.{number}."), rest),
            None => (String::new(), path),
        };
        let own = match (path, block.is_empty()) {
            ("modulation", false) => pick(["scale_shift_table", "modulation"]).to_owned(),
            ("head.modulation", true) => pick(["scale_shift_table", "head.modulation"]).to_owned(),
            _ => {
                let (module, parameter) = path.rsplit_once('.')?;
                let (_, names) = MODULES.iter().find(|(ours, _)| *ours == module)?;
                // Norms have gamma and beta here, weight and bias there.
                let parameter = match parameter {
                    "gamma" => "weight",
                    "beta" => "bias",
                    other => other,
                };
                format!("{}.{parameter}", pick(*names))
            }
        };
        Some(block + &own)
    }

    fn of(files: &[SafeTensors<'_>]) -> Result<Self, ImportError> {
        let name = |naming: Naming| naming.tensor("time.projection.weight").expect("a parameter");
        let named = |naming: &Naming| find(files, &name(*naming)).is_some();
        let known = [Naming::Diffusers, Naming::Wan];
        known
            .into_iter()
            .find(named)
            .ok_or_else(|| ImportError::Naming(name(Naming::Diffusers), name(Naming::Wan)))
    }
}

impl VideoDit {
    /// The model with the weights of a checkpoint, under the names of diffusers or of Wan, in the dtype that the model has.
    ///
    /// # Errors
    /// If a parameter is missing, of another shape or dtype, or the files have a tensor that is no parameter.
    pub fn load(self, files: &[SafeTensors<'_>]) -> Result<Self, ImportError> {
        let mut load = Load {
            files,
            naming: Naming::of(files)?,
            path: Vec::new(),
            taken: HashSet::new(),
            error: None,
        };
        let model = self.map(&mut load);
        if let Some(error) = load.error {
            return Err(error);
        }
        let mut names = files.iter().flat_map(|file| file.names());
        match names.find(|name| !load.taken.contains(*name)) {
            Some(name) => Err(ImportError::Unused(name.to_owned())),
            None => Ok(model),
        }
    }
}

struct Load<'a> {
    files: &'a [SafeTensors<'a>],
    naming: Naming,
    path: Vec<String>,
    taken: HashSet<String>,
    error: Option<ImportError>,
}

impl Load<'_> {
    /// The tensor of a parameter of this shape; of a linear layer as `[outputs, inputs]`.
    fn read(&mut self, shape: &[usize]) -> Result<TensorData, ImportError> {
        let path = self.path.join(".");
        let name = self.naming.tensor(&path).unwrap_or_else(|| path.clone());
        let Some(view) = find(self.files, &name) else {
            return Err(ImportError::Missing { name, path });
        };
        // The kernel of a convolution over patches is that of a linear layer.
        let (found, expected) = match *shape {
            [inputs, outputs] => {
                let (first, rest) = view.shape().split_first().unwrap_or((&0, &[]));
                (vec![*first, rest.iter().product()], vec![outputs, inputs])
            }
            _ => (view.shape().to_vec(), shape.to_vec()),
        };
        if found != expected {
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

impl ModuleMapper for Load<'_> {
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

fn find<'a>(files: &'a [SafeTensors<'_>], name: &str) -> Option<TensorView<'a>> {
    files.iter().find_map(|file| file.tensor(name).ok())
}
