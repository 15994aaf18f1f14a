use std::collections::HashMap;

use burn::module::ParamId;

use crate::layout::{Axis, Layout, Mesh};

/// The parameters of a module that are not replicated, with their layouts. Every other parameter is held whole by every
/// rank.
#[derive(Clone, Debug, Default)]
pub struct ParamLayouts {
    sharded: HashMap<ParamId, Layout>,
}

impl ParamLayouts {
    /// No parameter is sharded.
    pub fn replicated() -> Self {
        Self::default()
    }

    /// Also lists a parameter that lies like this.
    pub fn with(mut self, id: ParamId, layout: Layout) -> Self {
        self.list(id, layout);
        self
    }

    /// [`with`](Self::with), in place.
    pub fn list(&mut self, id: ParamId, layout: Layout) {
        self.sharded.insert(id, layout);
    }

    /// The layout of a parameter that is not replicated.
    pub fn layout(&self, id: ParamId) -> Option<&Layout> {
        self.sharded.get(&id)
    }

    /// The axes that shard a parameter, in the order of [`Axis::ALL`].
    pub fn sharded_axes(&self, id: ParamId) -> Vec<Axis> {
        let Some(layout) = self.layout(id) else {
            return Vec::new();
        };
        let mut axes: Vec<Axis> = (0..layout.shape().len())
            .flat_map(|dim| layout.shards(dim).iter().map(|(axis, _)| *axis))
            .collect();
        axes.sort();
        axes
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
