//! What a state has: every tensor's name, dtype and whole shape, in the order of the file.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, BoolStore, DType, Int, Tensor};
use burn_pack::Scalar;
use burn_sp_comm::Site;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::folder::INFO;
use super::optimizer::Moments;
use super::{StateError, StateInfo, StateStore};

/// Bytes of an element, largest first: in this order tensors are aligned, as some readers want them.
pub(super) const SIZES: [usize; 4] = [8, 4, 2, 1];

/// A tensor of the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    /// Whole.
    pub shape: Vec<usize>,
}

/// A parameter, and what the optimizer keeps of it, by the optimizer's name.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Planned {
    pub tensor: Entry,
    pub moments: Vec<(String, Entry)>,
}

/// What is to be saved.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Plan {
    /// In the module's order.
    pub parameters: Vec<Planned>,
    pub scalars: Vec<(String, Scalar)>,
}

impl Plan {
    /// As rank 0 sees it, which has a part of whatever any rank has.
    pub fn new<M: Module>(
        store: &StateStore,
        module: &M,
        optimizer: &ModuleOptimizer,
        shared: bool,
        site: Site,
    ) -> Result<Self, StateError> {
        let mut planner = Planner {
            store,
            optimizer,
            shared,
            site,
            path: Vec::new(),
            plan: Plan::default(),
            names: HashSet::new(),
            failed: None,
        };
        module.visit(&mut planner);
        match planner.failed {
            Some(error) => Err(error),
            None => Ok(planner.plan),
        }
    }

    /// The scalars with elements of this size.
    pub fn scalars(&self, size: usize) -> impl Iterator<Item = (&str, Scalar)> {
        let all = self.scalars.iter().map(|(name, value)| (name.as_str(), *value));
        all.filter(move |(_, value)| scalar_bytes(*value).1.len() == size)
    }

    /// The header of the file.
    pub fn header(&self, info: &StateInfo) -> Metadata {
        let mut tensors = Vec::new();
        let mut from = 0;
        let mut add = |name: &str, dtype: Dtype, shape: &[usize]| {
            let to = from + shape.iter().product::<usize>() * element_size(dtype);
            let info = TensorInfo {
                dtype,
                shape: shape.to_vec(),
                data_offsets: (from, to),
            };
            tensors.push((name.to_owned(), info));
            from = to;
        };
        for size in SIZES {
            for (name, value) in self.scalars(size) {
                add(name, scalar_bytes(value).0, &[]);
            }
            for planned in &self.parameters {
                for entry in planned.of_size(size) {
                    add(&entry.name, entry.dtype, &entry.shape);
                }
            }
        }
        let info = serde_json::to_string(info).expect("plain values become JSON");
        let info = HashMap::from([(INFO.to_owned(), info)]);
        Metadata::new(Some(info), tensors).expect("tensors lie one behind the other")
    }
}

impl Planned {
    /// What it has of elements of this size, in the order of the file.
    fn of_size(&self, size: usize) -> impl Iterator<Item = &Entry> {
        let entries = std::iter::once(&self.tensor).chain(self.moments.iter().map(|(_, entry)| entry));
        entries.filter(move |entry| element_size(entry.dtype) == size)
    }
}

/// What the optimizer's tensor or number of that name is called in the file. A path has no slash.
pub(super) fn moment_name(path: &str, name: &str) -> String {
    format!("optimizer/{path}/{name}")
}

/// The parameter's path and the optimizer's name, from a name that [`moment_name`] made.
pub(super) fn moment_of(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("optimizer/")?.split_once('/')
}

/// A number of an optimizer as a tensor without dimensions.
pub(super) fn scalar_bytes(value: Scalar) -> (Dtype, Vec<u8>) {
    match value {
        Scalar::Int(value) => (Dtype::I64, value.to_le_bytes().into()),
        Scalar::UInt(value) => (Dtype::U64, value.to_le_bytes().into()),
        Scalar::Float(value) => (Dtype::F64, value.to_le_bytes().into()),
        Scalar::Bool(value) => (Dtype::BOOL, vec![value.into()]),
    }
}

/// Its inverse; none if no scalar is written like this.
pub(super) fn scalar_of(dtype: Dtype, bytes: &[u8]) -> Option<Scalar> {
    let word = || <[u8; 8]>::try_from(bytes).ok();
    match dtype {
        Dtype::I64 => word().map(|word| Scalar::Int(i64::from_le_bytes(word))),
        Dtype::U64 => word().map(|word| Scalar::UInt(u64::from_le_bytes(word))),
        Dtype::F64 => word().map(|word| Scalar::Float(f64::from_le_bytes(word))),
        Dtype::BOOL => bytes.first().map(|byte| Scalar::Bool(*byte != 0)),
        _ => None,
    }
}

const DTYPES: [(DType, Dtype); 13] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U16, Dtype::U16),
    (DType::U8, Dtype::U8),
    (DType::Bool(BoolStore::Native), Dtype::BOOL),
];

/// Burn's name of a dtype that a state holds.
pub(super) fn burn_dtype(dtype: Dtype) -> Option<DType> {
    DTYPES
        .into_iter()
        .find(|(_, file)| *file == dtype)
        .map(|(burn, _)| burn)
}

/// The file's name of a dtype.
fn file_dtype(dtype: DType) -> Option<Dtype> {
    let dtype = match dtype {
        DType::Bool(_) => DType::Bool(BoolStore::Native),
        // Computed in less, kept in full.
        DType::Flex32 => DType::F32,
        other => other,
    };
    DTYPES
        .into_iter()
        .find(|(burn, _)| *burn == dtype)
        .map(|(_, file)| file)
}

pub(super) fn element_size(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

struct Planner<'a> {
    store: &'a StateStore,
    optimizer: &'a ModuleOptimizer,
    shared: bool,
    site: Site,
    path: Vec<String>,
    plan: Plan,
    names: HashSet<String>,
    failed: Option<StateError>,
}

impl Planner<'_> {
    fn entry(name: String, dtype: DType, shape: Vec<usize>) -> Result<Entry, StateError> {
        match file_dtype(dtype) {
            Some(dtype) => Ok(Entry { name, dtype, shape }),
            None => Err(StateError::Dtype {
                name,
                dtype: dtype.name().to_owned(),
            }),
        }
    }

    /// Adds a parameter that is whole if it is not of floats; `own` is its shape on this rank.
    fn add(&mut self, id: ParamId, dtype: DType, own: &[usize], float: bool) -> Result<(), StateError> {
        let path = self.path.join(".");
        if !self.names.insert(path.clone()) {
            return Err(StateError::Twice { name: path });
        }
        if !float {
            let tensor = Self::entry(path, dtype, own.to_vec())?;
            let moments = Vec::new();
            self.plan.parameters.push(Planned { tensor, moments });
            return Ok(());
        }
        let share = self.store.moment_share(id, own, self.shared, self.site);
        let moments = Moments::of(self.optimizer, id, &path)?;
        for (name, value) in moments.scalars {
            self.plan.scalars.push((moment_name(&path, &name), value));
        }
        let moments = moments.tensors.into_iter().map(|(field, data)| {
            let (name, shape) = (moment_name(&path, &field), data.shape().to_vec());
            let elementwise = shape == share.own_shape(own.len()).unwrap_or(own.to_vec());
            let whole = match elementwise {
                true => share.whole_shape(own),
                false if share.is_whole() => shape,
                false => return Err(StateError::Elementwise { name, shape }),
            };
            Ok((field, Self::entry(name, data.dtype(), whole)?))
        });
        let moments = moments.collect::<Result<_, _>>()?;
        let whole = self.store.share(id).whole_shape(own);
        let tensor = Self::entry(path, dtype, whole)?;
        self.plan.parameters.push(Planned { tensor, moments });
        Ok(())
    }

    fn visit(&mut self, id: ParamId, dtype: DType, own: &[usize], float: bool) {
        if self.failed.is_none() {
            self.failed = self.add(id, dtype, own, float).err();
        }
    }
}

impl ModuleVisitor for Planner<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visit(param.id, param.val().dtype(), &param.dims(), true);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.visit(param.id, param.val().dtype(), &param.dims(), false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.visit(param.id, param.val().dtype(), &param.dims(), false);
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}
