use burn::module::{ParamGroup, ParamId};
use burn::optim::{ModuleOptimizer, OptimizerRecord, SgdConfig};
use burn::tensor::TensorData;
use burn_pack::{Reader, Scalar, Writer};

use super::StateError;
use crate::train::ShardedOptimizer;

/// An optimizer whose state can be saved and loaded.
pub trait StatefulOptimizer: Sized {
    /// Burn's optimizer, with the state of what this rank updates.
    fn optimizer(&self) -> &ModuleOptimizer;

    /// Whether that is a flat part of each parameter, as [`ShardedOptimizer`] keeps it, or all that the rank holds.
    fn is_shared(&self) -> bool;

    /// The same optimizer with another state, of the same kind of optimizer.
    fn with_record(self, record: OptimizerRecord) -> Self;
}

impl StatefulOptimizer for ModuleOptimizer {
    fn optimizer(&self) -> &ModuleOptimizer {
        self
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn with_record(self, record: OptimizerRecord) -> Self {
        self.load_record(record)
    }
}

impl StatefulOptimizer for ShardedOptimizer {
    fn optimizer(&self) -> &ModuleOptimizer {
        self.inner()
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn with_record(self, record: OptimizerRecord) -> Self {
        ShardedOptimizer::new(self.into_inner().load_record(record))
    }
}

/// Under which Burn keeps a parameter's number of dimensions in a record; it is not the optimizer's.
const RANK: &str = "__rank";

/// What an optimizer keeps of one parameter, by name.
#[derive(Default)]
pub(super) struct Moments {
    pub tensors: Vec<(String, TensorData)>,
    pub scalars: Vec<(String, Scalar)>,
}

impl Moments {
    /// Of a parameter; nothing if it has not been updated.
    ///
    /// Burn hands out a record of all parameters and only as the bytes of a file. So that not all states are copied at
    /// once, it is asked for one of an optimizer that has forgotten the others: those that match a group which is added.
    pub fn of(optimizer: &ModuleOptimizer, id: ParamId, name: &str) -> Result<Self, StateError> {
        let others = ParamGroup::all().exclude(ParamGroup::from_ids(vec![id]));
        let alone = optimizer.clone().with_group(others, SgdConfig::new().build(), None);
        let failed = failed(name);
        let bytes = alone.to_record().into_bytes().map_err(|error| failed(&error))?;
        let reader = Reader::from_bytes(bytes).map_err(|error| failed(&error))?;
        let prefix = format!("{}.", id.val());
        let own = |key: &str| key.strip_prefix(&prefix).unwrap_or(key).to_owned();
        let scalars = reader.scalars().iter().map(|(key, value)| (own(key), *value));
        let scalars = scalars.filter(|(key, _)| key != RANK).collect();
        let tensors = reader.into_tensors().map_err(|error| failed(&error))?;
        let tensors = tensors.into_iter().map(|tensor| {
            let (key, dtype, shape, _, bytes) = tensor.into_parts().map_err(|error| failed(&error))?;
            Ok((own(&key), TensorData::from_bytes(bytes, shape, dtype)))
        });
        Ok(Self {
            tensors: tensors.collect::<Result<_, _>>()?,
            scalars,
        })
    }

    /// The tensor of that name.
    pub fn take(&mut self, name: &str) -> Option<TensorData> {
        let at = self.tensors.iter().position(|(own, _)| own == name)?;
        Some(self.tensors.swap_remove(at).1)
    }
}

/// A record for an optimizer, put together parameter by parameter.
#[derive(Default)]
pub(super) struct Record {
    tensors: Vec<burn_pack::Tensor>,
    scalars: Vec<(String, Scalar)>,
    paths: Vec<(String, String)>,
}

impl Record {
    /// Adds what an optimizer keeps of a parameter of so many dimensions.
    pub fn add(&mut self, id: ParamId, path: &str, dims: usize, moments: Moments) {
        let key = |name: &str| format!("{}.{name}", id.val());
        for (name, data) in moments.tensors {
            let (bytes, shape, dtype) = data.into_parts();
            let tensor = burn_pack::Tensor::new(key(&name), dtype, shape, Some(id.val()), bytes);
            self.tensors.push(tensor);
        }
        let scalars = moments.scalars.into_iter();
        self.scalars.extend(scalars.map(|(name, value)| (key(&name), value)));
        self.scalars.push((key(RANK), Scalar::from(dims)));
        self.paths.push((id.val().to_string(), path.to_owned()));
    }

    /// How many tensors were added.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// The record, as Burn reads it.
    pub fn finish(self) -> Result<OptimizerRecord, StateError> {
        let failed = failed("all parameters");
        let mut writer = Writer::new(self.tensors);
        for (key, value) in &self.scalars {
            writer = writer.with_scalar(key, *value);
        }
        for (key, path) in &self.paths {
            writer = writer.with_metadata(key, path);
        }
        let bytes = writer.into_bytes().map_err(|error| failed(&error))?;
        OptimizerRecord::from_bytes(bytes).map_err(|error| failed(&error))
    }
}

fn failed(name: &str) -> impl Fn(&dyn std::fmt::Display) -> StateError {
    let name = name.to_owned();
    move |why| StateError::Record {
        name: name.clone(),
        why: why.to_string(),
    }
}
