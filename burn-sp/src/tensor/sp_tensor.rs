use std::sync::Arc;

use burn::tensor::{Float, Int, Tensor, TensorData};
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
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
///
/// let sums = launch(&LaunchConfig::new(MeshShape::ulysses(2)), &Device::flex(), |device: SpDevice| {
///     // Rank 0 has tokens 0 and 1, rank 1 token 2.
///     let whole = Tensor::<2>::from_floats([[1.0], [2.0], [3.0]], device.device());
///     let layout = Layout::replicated([3, 1]).shard(0, Axis::Ulysses, Split::Contiguous);
///     let tokens = device.distribute(whole, &layout).tokenwise(|x| x.mul_scalar(10.0));
///     // A rank's sum is a term of the sum over all tokens.
///     let sum = tokens.sum_dim(0);
///     assert_eq!(sum.layout().placement(Axis::Ulysses), Placement::Partial);
///     let sum = sum.redistribute(Axis::Ulysses, Placement::Replicate);
///     sum.into_local().into_scalar::<f32>()
/// })?;
/// assert_eq!(sums, [60.0, 60.0]);
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SpTensor<const D: usize, K: SpKind = Float> {
    local: Tensor<D, K>,
    layout: Layout,
    mesh: Arc<Mesh>,
}

impl<const D: usize, K: SpKind> SpTensor<D, K> {
    /// Wraps this rank's part of a tensor.
    ///
    /// # Shapes
    /// - `local`: [`Layout::local_shape`] of this rank; the result is of [`Layout::shape`]
    ///
    /// # Panics
    /// If the part's shape is not the one that the layout gives this rank.
    #[track_caller]
    pub fn from_local(local: Tensor<D, K>, layout: Layout, device: &SpDevice) -> Self {
        Self::checked("from_local", local, layout, device.mesh().clone())
    }

    /// Wraps a tensor that every rank holds whole (and equal).
    ///
    /// # Shapes
    /// - `whole`: any, the same on all ranks, and so is the result
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

    /// The shape of the whole tensor, in elements.
    pub fn global_shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// This rank's part, to look at. Arithmetic on it leaves the checked world: see [`into_local`](Self::into_local).
    pub fn local(&self) -> &Tensor<D, K> {
        &self.local
    }

    /// The global positions of `dim` that this rank holds, in local order.
    ///
    /// # Panics
    /// If there is no such dimension.
    pub fn positions(&self, dim: usize) -> kernels_cubecl::Positions {
        kernels_cubecl::Positions::new(self.layout.positions(dim, &self.mesh))
    }

    /// [`positions`](Self::positions) as ids, on the tensor's device: a row for a learned position embedding, whose vectors
    /// are then added to every sample's.
    ///
    /// # Shapes
    /// - returns `[1, positions]`, as many as `dim` has here
    ///
    /// # Panics
    /// If there is no such dimension.
    pub fn position_ids(&self, dim: usize) -> Tensor<2, Int> {
        let ids: Vec<i64> = self.positions(dim).iter().map(|position| position as i64).collect();
        let count = ids.len();
        // Not reshaped from one dimension: Burn takes a length of 0, of a rank without tokens, as one to keep.
        Tensor::from_data(TensorData::new(ids, [1, count]), &self.local.device())
    }

    /// Leaves the layout behind and keeps this rank's part.
    ///
    /// # Shapes
    /// - returns [`Layout::local_shape`] of this rank
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
    /// # Shapes
    /// - returns [`Layout::local_shape`] of this rank
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
    /// # Shapes
    /// - the global shape stays; `dim` of a `Shard(dim)` is this rank's part of it
    ///
    /// # Panics
    /// If there is no such dimension, or the axis shards one but is not the innermost to do so.
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
    ///
    /// # Panics
    /// As [`redistribute`](Self::redistribute), or if an explicit split is for another length or number of ranks.
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

    /// Makes the tensor whole on every rank: shards are gathered, terms added up.
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
    /// # Shapes
    /// - the closure gets this rank's part and returns as many tokens: dimensions that are sharded keep place and
    ///   length
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
    ///
    /// # Panics
    /// If there are no such dimensions.
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
