use std::ops::Range;

use burn::tensor::Tensor;
use burn_sp_comm::Parts;

use crate::{
    SpTensor,
    layout::{Axis, Layout, Mesh, Split},
    tensor::Refusal,
};

/// The features that tensor parallelism splits, in units that stay together: heads of some features each, or hidden units
/// and classes of one.
///
/// Units are split contiguously over [`Axis::Tp`], the first ranks with one more: 6 heads on 4 ranks are 2, 2, 1, 1. With
/// fewer units than ranks, the last ranks have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    units: usize,
    size: usize,
    sharded: bool,
}

impl Features {
    /// `units` of `size` features each, shared out over the ranks of [`Axis::Tp`].
    pub fn sharded(units: usize, size: usize) -> Self {
        Self {
            units,
            size,
            sharded: true,
        }
    }

    /// `units` of `size` features each, all of which every rank has.
    pub fn whole(units: usize, size: usize) -> Self {
        Self {
            units,
            size,
            sharded: false,
        }
    }

    /// How many features all ranks have.
    pub fn count(&self) -> usize {
        self.units * self.size
    }

    /// Whether the ranks of this mesh have different ones.
    pub fn is_split(&self, mesh: &Mesh) -> bool {
        self.sharded && mesh.size(Axis::Tp) > 1
    }

    /// This rank's features.
    pub fn range(&self, mesh: &Mesh) -> Range<usize> {
        if !self.is_split(mesh) {
            return 0..self.count();
        }
        self.parts(mesh).of(mesh.coordinate(Axis::Tp))[0].clone()
    }

    /// The layout with `dim`, whose entries are these features, split as they are.
    ///
    /// # Panics
    /// If there is no such dimension, or the layout uses [`Axis::Tp`] already.
    pub fn on(&self, layout: Layout, dim: usize, mesh: &Mesh) -> Layout {
        match (self.is_split(mesh), self.size) {
            (false, _) => layout,
            (true, 1) => layout.shard(dim, Axis::Tp, Split::Contiguous),
            (true, _) => layout.shard(dim, Axis::Tp, Split::Explicit(self.parts(mesh))),
        }
    }

    fn parts(&self, mesh: &Mesh) -> Parts {
        let ranks = mesh.size(Axis::Tp);
        let units = Parts::contiguous(self.units, ranks);
        let features = |rank: usize| {
            let scaled = |range: &Range<usize>| range.start * self.size..range.end * self.size;
            units.of(rank).iter().map(scaled).collect()
        };
        Parts::new((0..ranks).map(features).collect())
    }

    /// Takes the units apart; nothing moves between ranks.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, features]`; returns `[batch, tokens, units, size]`
    ///
    /// # Panics
    /// If the last dimension does not have these features.
    #[track_caller]
    pub fn split_units(&self, x: SpTensor<3>) -> SpTensor<4> {
        const OP: &str = "Features::split_units";
        let (local, layout, mesh) = x.into_parts();
        let tokens = unsharded(&layout, 2);
        let [batch, length, _] = *layout.shape() else {
            unreachable!("three dimensions")
        };
        let expected = self.on(tokens.clone().with_shape(vec![batch, length, self.count()]), 2, &mesh);
        refuse_unless(OP, &layout, &expected);
        let units = Features { size: 1, ..*self };
        let layout = units.on(tokens.with_shape(vec![batch, length, self.units, self.size]), 2, &mesh);
        let [batch, length, held] = local.dims();
        let local = local.reshape([batch, length, held / self.size.max(1), self.size]);
        SpTensor::checked(OP, local, layout, mesh)
    }

    /// Joins the units again; nothing moves between ranks.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, units, size]`; returns `[batch, tokens, features]`
    ///
    /// # Panics
    /// If the last two dimensions are not these units.
    #[track_caller]
    pub fn merge_units(&self, x: SpTensor<4>) -> SpTensor<3> {
        const OP: &str = "Features::merge_units";
        let (local, layout, mesh) = x.into_parts();
        let tokens = unsharded(&layout, 2);
        let [batch, length, _, _] = *layout.shape() else {
            unreachable!("four dimensions")
        };
        let units = Features { size: 1, ..*self };
        let whole = vec![batch, length, self.units, self.size];
        refuse_unless(OP, &layout, &units.on(tokens.clone().with_shape(whole), 2, &mesh));
        let layout = self.on(tokens.with_shape(vec![batch, length, self.count()]), 2, &mesh);
        let [batch, length, held, size] = local.dims();
        SpTensor::checked(OP, local.reshape([batch, length, held * size]), layout, mesh)
    }

    /// Refuses a parameter that is not this rank's part of one with this global layout, `dim` split as the features are.
    #[track_caller]
    pub(crate) fn check_shard<const D: usize>(
        &self,
        operation: &'static str,
        parameter: &Tensor<D>,
        whole: Layout,
        dim: usize,
        mesh: &Mesh,
    ) {
        let layout = self.on(whole, dim, mesh);
        let expected = layout.local_shape(mesh);
        if parameter.dims().as_slice() != expected {
            Refusal::new(
                operation,
                format!("the weight is {:?}", parameter.dims()),
                format!(
                    "rank {} of {layout} holds {expected:?}: shard the module before it is used",
                    mesh.rank()
                ),
            )
            .refuse();
        }
    }
}

/// The layout with nothing but its innermost axis, which is tensor parallelism's, taken off a dimension.
fn unsharded(layout: &Layout, dim: usize) -> Layout {
    match layout.shards(dim).last() {
        Some((Axis::Tp, _)) => layout.without_inner(dim),
        _ => layout.clone(),
    }
}

#[track_caller]
fn refuse_unless(operation: &'static str, found: &Layout, expected: &Layout) {
    if found != expected {
        Refusal::new(
            operation,
            format!("the tensor is {found}"),
            format!("it should be {expected}"),
        )
        .refuse();
    }
}
