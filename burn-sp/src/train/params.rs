use std::collections::HashMap;

use burn::module::ParamId;

use crate::layout::{Axis, Mesh};

/// The parameters of a module that are not replicated, with the axes that shard them. Every other parameter is held
/// whole by every rank.
#[derive(Clone, Debug, Default)]
pub struct ParamLayouts {
    sharded: HashMap<ParamId, Vec<Axis>>,
}

impl ParamLayouts {
    /// No parameter is sharded.
    pub fn replicated() -> Self {
        Self::default()
    }

    /// Also lists a parameter that these axes shard.
    pub fn with(mut self, id: ParamId, axes: impl Into<Vec<Axis>>) -> Self {
        self.sharded.insert(id, axes.into());
        self
    }

    /// The axes that shard a parameter.
    pub fn sharded_axes(&self, id: ParamId) -> &[Axis] {
        self.sharded.get(&id).map_or(&[], Vec::as_slice)
    }

    /// The axes with more than one rank on which a parameter is replicated, so that its gradient is partial on them.
    pub fn replicated_axes(&self, id: ParamId, mesh: &Mesh) -> Vec<Axis> {
        let sharded = self.sharded_axes(id);
        Axis::ALL
            .into_iter()
            .filter(|axis| mesh.size(*axis) > 1 && !sharded.contains(axis))
            .collect()
    }
}
