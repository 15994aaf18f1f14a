//! An optimizer's state as numbers in host memory.

use std::collections::BTreeMap;
use std::fmt::Display;

use burn::module::ParamId;
use burn::optim::{DynOptimizer, DynState, LearningRate, OptimizerRecord, StateSink, StateSource};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Device, TensorData};
use burn_pack::{Reader, Scalar, Writer};
use burn_sp_comm::{CommError, raise};

/// An optimizer's state, taken apart. Burn hands a record out as the bytes of a file only.
pub(super) struct Moments {
    /// By names that begin with the parameter's id.
    tensors: BTreeMap<String, (Option<u64>, TensorData)>,
    scalars: BTreeMap<String, Scalar>,
    /// Of parameters, by id.
    paths: BTreeMap<String, String>,
}

fn failed<E: Display>(rank: usize) -> impl Fn(E) -> CommError {
    move |error| CommError::failed(rank, format!("the optimizer's state cannot be put together: {error}"))
}

impl Moments {
    /// On this rank.
    pub fn of(record: OptimizerRecord, rank: usize) -> Self {
        let bytes = record.into_bytes().map_err(failed(rank));
        let reader = bytes.and_then(|bytes| Reader::from_bytes(bytes).map_err(failed(rank)));
        let reader = reader.unwrap_or_else(|error| raise(error));
        let (scalars, paths) = (reader.scalars().clone(), reader.metadata().clone());
        let tensors = reader.into_tensors().unwrap_or_else(|error| raise(failed(rank)(error)));
        let tensors = tensors.into_iter().map(|tensor| {
            let parts = tensor.into_parts().unwrap_or_else(|error| raise(failed(rank)(error)));
            let (name, dtype, shape, id, bytes) = parts;
            (name, (id, TensorData::from_bytes(bytes, shape, dtype)))
        });
        Self {
            tensors: tensors.collect(),
            scalars,
            paths,
        }
    }

    pub fn into_record(self, rank: usize) -> OptimizerRecord {
        let tensors = self.tensors.into_iter().map(|(name, (id, data))| {
            let (bytes, shape, dtype) = data.into_parts();
            burn_pack::Tensor::new(name, dtype, shape, id, bytes)
        });
        let mut writer = Writer::new(tensors.collect());
        for (name, value) in self.scalars {
            writer = writer.with_scalar(&name, value);
        }
        for (name, path) in self.paths {
            writer = writer.with_metadata(&name, &path);
        }
        let bytes = writer.into_bytes().map_err(failed(rank));
        let record = bytes.and_then(|bytes| OptimizerRecord::from_bytes(bytes).map_err(failed(rank)));
        record.unwrap_or_else(|error| raise(error))
    }

    /// Those of a parameter, with their names, in the same order on every rank.
    pub fn of_param(&mut self, id: ParamId) -> impl Iterator<Item = (&String, &mut TensorData)> {
        let tensors = self.tensors.iter_mut();
        let own = tensors.filter(move |(_, (of, _))| *of == Some(id.val()));
        own.map(|(name, (_, data))| (name, data))
    }
}

/// An optimizer that only has a state, for a learner that is saved and makes no step. Any other would load its state to
/// Burn's default device, which may have no room for that of a whole model.
pub(super) struct Held(Moments);

impl Held {
    /// It, and a record that makes a [`ModuleOptimizer`](burn::optim::ModuleOptimizer) ask it for the state of each
    /// parameter.
    pub fn new(moments: Moments, rank: usize) -> (Self, OptimizerRecord) {
        let names = Moments {
            tensors: BTreeMap::new(),
            scalars: moments.scalars.clone(),
            paths: moments.paths.clone(),
        };
        (Self(moments), names.into_record(rank))
    }
}

impl DynOptimizer for Held {
    fn step_dyn(
        &self,
        _rank: usize,
        _lr: LearningRate,
        _tensor: BridgeTensor,
        _grad: BridgeTensor,
        _state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        unreachable!("a learner that is saved makes no step")
    }

    fn to_device_dyn(&self, state: DynState, _device: &Device) -> DynState {
        state
    }

    fn state_flatten(&self, prefix: &str, _state: &DynState, out: &mut StateSink) {
        let Moments { tensors, scalars, .. } = &self.0;
        let prefix = format!("{prefix}.");
        let own = tensors.iter().filter(|(name, _)| name.starts_with(&prefix));
        out.tensors
            .extend(own.map(|(name, (_, data))| (name.clone(), data.clone())));
        let own = scalars.iter().filter(|(name, _)| name.starts_with(&prefix));
        out.scalars.extend(own.map(|(name, value)| (name.clone(), *value)));
    }

    fn state_unflatten(
        &self,
        rank: usize,
        _prefix: &str,
        _source: &mut StateSource,
        _device: &Device,
    ) -> Option<DynState> {
        // All of it is here.
        Some(DynState::create((), rank))
    }
}
