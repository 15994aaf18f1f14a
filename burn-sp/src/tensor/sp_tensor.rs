use std::sync::Arc;

use burn::tensor::{Float, Tensor};
use burn_sp_comm::{Site, raise};

use super::{
    Refusal, SpDevice, SpKind,
    transition::{Place, Transition},
};
use crate::layout::{Axis, Layout, Mesh, Placement, Split};

/// A Burn tensor with its [`Layout`] on a [`Mesh`]: this rank's part of a global tensor.
///
/// It has few operations of its own. Layouts change by [`redistribute`](Self::redistribute); whatever treats each
/// token by itself goes through [`tokenwise`](Self::tokenwise), so a `Linear`, a norm or an activation stays Burn's.
/// Operations that would be wrong on a layout panic with a [`Refusal`] that says what would work.
#[derive(Clone, Debug)]
pub struct SpTensor<const D: usize, K: SpKind = Float> {
    local: Tensor<D, K>,
    layout: Layout,
    mesh: Arc<Mesh>,
}

impl<const D: usize, K: SpKind> SpTensor<D, K> {
    /// Wraps this rank's part of a tensor.
    ///
    /// # Panics
    /// If the part's shape is not the one that the layout gives this rank.
    #[track_caller]
    pub fn from_local(local: Tensor<D, K>, layout: Layout, device: &SpDevice) -> Self {
        Self::checked("from_local", local, layout, device.mesh().clone())
    }

    /// Wraps a tensor that every rank holds whole (and equal).
    pub fn replicated(whole: Tensor<D, K>, device: &SpDevice) -> Self {
        let layout = Layout::replicated(whole.dims());
        Self {
            local: whole,
            layout,
            mesh: device.mesh().clone(),
        }
    }

    #[track_caller]
    pub(crate) fn checked(operation: &'static str, local: Tensor<D, K>, layout: Layout, mesh: Arc<Mesh>) -> Self {
        let expected = layout.local_shape(&mesh);
        if local.dims().as_slice() != expected {
            Refusal::new(
                operation,
                format!("the local tensor is {:?}", local.dims()),
                format!("rank {} of {layout} holds {expected:?}", mesh.rank()),
            )
            .refuse();
        }
        Self { local, layout, mesh }
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The mesh.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// The shape of the whole tensor.
    pub fn global_shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// This rank's part, to look at. Arithmetic on it leaves the checked world: see [`into_local`](Self::into_local).
    pub fn local(&self) -> &Tensor<D, K> {
        &self.local
    }

    /// The global positions of `dim` that this rank holds, in local order.
    pub fn positions(&self, dim: usize) -> kernels_cubecl::Positions {
        kernels_cubecl::Positions::new(self.layout.positions(dim, &self.mesh))
    }

    /// Leaves the layout behind and keeps this rank's part.
    ///
    /// # Panics
    /// If the tensor is partial: a term is not the value. Name what is left behind with
    /// [`into_partial_term`](Self::into_partial_term), or redistribute first.
    #[track_caller]
    pub fn into_local(self) -> Tensor<D, K> {
        self.refuse_partial("into_local");
        self.local
    }

    /// Leaves the layout behind and keeps this rank's term of a sum over exactly these axes.
    ///
    /// # Panics
    /// If the tensor is not partial over exactly these axes.
    #[track_caller]
    pub fn into_partial_term(self, axes: &[Axis]) -> Tensor<D, K> {
        let mut named = axes.to_vec();
        named.sort();
        if named != self.layout.partial_axes() {
            Refusal::new(
                "into_partial_term",
                format!("{} was named as a sum over {axes:?}", self.layout),
                "name exactly the axes over which it is partial",
            )
            .refuse();
        }
        self.local
    }

    /// Changes the placement on one axis. Differentiable; the gradient goes through the dual change.
    ///
    /// A dimension that becomes sharded is split contiguously; [`shard`](Self::shard) takes another split.
    ///
    /// # Panics
    /// If the axis shards a dimension but is not the innermost to do so.
    #[track_caller]
    pub fn redistribute(self, axis: Axis, to: Placement) -> Self {
        match to {
            Placement::Shard(dim) => self.shard(axis, dim, Split::Contiguous),
            Placement::Replicate => {
                let layout = self.without("redistribute", axis);
                self.change(axis, layout, Place::Replicate)
            }
            Placement::Partial => {
                let layout = self.without("redistribute", axis).partial(axis);
                self.change(axis, layout, Place::Partial)
            }
        }
    }

    /// [`redistribute`](Self::redistribute) to `Shard(dim)` with a split.
    #[track_caller]
    pub fn shard(self, axis: Axis, dim: usize, split: Split) -> Self {
        if dim >= D {
            Refusal::new(
                "shard",
                format!("{} has no dimension {dim}", self.layout),
                format!("use 0..{D}"),
            )
            .refuse();
        }
        let layout = self.without("shard", axis).shard(dim, axis, split);
        let parts = layout.inner_parts(dim, &self.mesh);
        self.change(axis, layout, Place::Shard { dim, parts })
    }

    /// Makes the tensor whole on every rank.
    #[track_caller]
    pub fn gather(self) -> Self {
        let mut tensor = self;
        for axis in tensor.layout.partial_axes().to_vec() {
            tensor = tensor.redistribute(axis, Placement::Replicate);
        }
        for dim in 0..D {
            while let Some((axis, _)) = tensor.layout.shards(dim).last().cloned() {
                tensor = tensor.redistribute(axis, Placement::Replicate);
            }
        }
        tensor
    }

    /// Does to each token what needs no other token: a linear layer, a norm, an activation, an embedding. The closure
    /// gets this rank's part.
    ///
    /// # Panics
    /// If the tensor is partial (a bias, say, would count once a rank), or the closure changes a sharded dimension.
    #[track_caller]
    pub fn tokenwise<const D2: usize, K2: SpKind>(
        self,
        token: impl FnOnce(Tensor<D, K>) -> Tensor<D2, K2>,
    ) -> SpTensor<D2, K2> {
        self.refuse_partial("tokenwise");
        let before = self.local.dims();
        let local = token(self.local);
        let mut shape = local.dims().to_vec();
        for dim in (0..D).filter(|dim| !self.layout.shards(*dim).is_empty()) {
            if shape.get(dim) != Some(&before[dim]) {
                Refusal::new(
                    "tokenwise",
                    format!(
                        "dimension {dim} of {} is sharded, and {before:?} became {shape:?}",
                        self.layout
                    ),
                    "keep sharded dimensions where they are and as long as they are, or gather them first",
                )
                .refuse();
            }
            shape[dim] = self.layout.shape()[dim];
        }
        SpTensor {
            local,
            layout: self.layout.with_shape(shape),
            mesh: self.mesh,
        }
    }

    /// Swaps two dimensions; nothing moves between ranks.
    pub fn swap_dims(self, a: usize, b: usize) -> Self {
        Self {
            local: self.local.swap_dims(a, b),
            layout: self.layout.swap_dims(a, b),
            mesh: self.mesh,
        }
    }

    /// Parts, layout and mesh, for the operations of this crate.
    pub(crate) fn into_parts(self) -> (Tensor<D, K>, Layout, Arc<Mesh>) {
        (self.local, self.layout, self.mesh)
    }

    #[track_caller]
    pub(crate) fn refuse_partial(&self, operation: &'static str) {
        if let Some(axis) = self.layout.partial_axes().first() {
            let dim = (0..D).max_by_key(|dim| self.layout.shape()[*dim]).unwrap_or(0);
            Refusal::new(
                operation,
                format!(
                    "the value {} is a sum of terms that its ranks still hold apart",
                    self.layout
                ),
                format!(
                    "add them first with .redistribute(Axis::{axis:?}, Placement::Replicate) or \
                     .redistribute(Axis::{axis:?}, Placement::Shard({dim}))"
                ),
            )
            .refuse();
        }
    }

    /// The layout with the axis replicated; refuses to pull an outer axis from under an inner one.
    #[track_caller]
    fn without(&self, operation: &'static str, axis: Axis) -> Layout {
        match self.layout.placement(axis) {
            Placement::Replicate => self.layout.clone(),
            Placement::Partial => self.layout.without_partial(axis),
            Placement::Shard(dim) => {
                let (inner, _) = self.layout.shards(dim).last().expect("the axis shards it");
                if *inner != axis {
                    Refusal::new(
                        operation,
                        format!("{axis} is not the innermost axis on dimension {dim} of {}", self.layout),
                        format!("redistribute {inner} first"),
                    )
                    .refuse();
                }
                self.layout.without_inner(dim)
            }
        }
    }

    #[track_caller]
    fn change(self, axis: Axis, layout: Layout, to: Place) -> Self {
        let from = match self.layout.placement(axis) {
            Placement::Replicate => Place::Replicate,
            Placement::Partial => Place::Partial,
            Placement::Shard(dim) => Place::Shard {
                dim,
                parts: self.layout.inner_parts(dim, &self.mesh),
            },
        };
        if from == to || self.mesh.size(axis) == 1 {
            return Self { layout, ..self };
        }
        let comm = match self.mesh.group(&[axis]) {
            Ok(comm) => comm,
            Err(error) => raise(error),
        };
        let transition = Transition {
            from,
            to,
            comm,
            site: Site::here(),
        };
        Self {
            local: K::transition(self.local, transition),
            layout,
            mesh: self.mesh,
        }
    }
}
