//! The arithmetic that has a rule for layouts. On a partial value only what commutes with a sum is allowed.

use burn::tensor::Tensor;

use super::{Refusal, SpTensor};
use crate::layout::{Axis, Layout, Placement};

impl<const D: usize> SpTensor<D> {
    /// Elementwise sum of two tensors of the same layout. Two partial values over the same axes add to a partial one.
    ///
    /// # Shapes
    /// - both the same, and so is the result, in the same layout
    ///
    /// # Panics
    /// If the layouts differ: a replicated or sharded value added to a partial one would count once a rank.
    #[track_caller]
    #[allow(clippy::should_implement_trait)]
    pub fn add(self, other: Self) -> Self {
        self.same_layout("add", &other);
        let layout = self.layout().clone();
        self.with(other, layout, |a, b| a + b)
    }

    /// Elementwise difference; the rules of [`add`](Self::add).
    ///
    /// # Shapes
    /// - both the same, and so is the result
    ///
    /// # Panics
    /// As [`add`](Self::add).
    #[track_caller]
    #[allow(clippy::should_implement_trait)]
    pub fn sub(self, other: Self) -> Self {
        self.same_layout("sub", &other);
        let layout = self.layout().clone();
        self.with(other, layout, |a, b| a - b)
    }

    /// Elementwise product. One factor may be partial if the other is replicated on those axes.
    ///
    /// # Shapes
    /// - both the same, and so is the result
    ///
    /// # Panics
    /// If the shards differ, or both factors are partial: a product of sums is not the sum of products.
    #[track_caller]
    #[allow(clippy::should_implement_trait)]
    pub fn mul(self, other: Self) -> Self {
        self.same_shape_and_shards("mul", &other);
        let layout = self.contracted("mul", &other, self.layout().clone().without_partials());
        self.with(other, layout, |a, b| a * b)
    }

    /// Product with a constant; allowed on every layout.
    pub fn mul_scalar(self, factor: f64) -> Self {
        self.map(|local| local.mul_scalar(factor))
    }

    /// Sum with a constant.
    ///
    /// # Panics
    /// On a partial value: the constant would count once a rank.
    #[track_caller]
    pub fn add_scalar(self, term: f64) -> Self {
        self.refuse_partial("add_scalar");
        self.map(|local| local.add_scalar(term))
    }

    /// Matrix product over the last two dimensions. Where an axis shards the contracted dimension of both factors
    /// alike, the result is partial over it.
    ///
    /// # Shapes
    /// - `[..., m, k]` and `[..., k, n]`, the leading dimensions the same; returns `[..., m, n]`
    ///
    /// # Panics
    /// If the shapes do not fit, an axis shards the contracted dimension of one factor only, or both factors in ways
    /// that do not meet.
    #[track_caller]
    pub fn matmul(self, other: Self) -> Self {
        const OP: &str = "matmul";
        let (a, b) = (self.layout(), other.layout());
        let both = |help: &str| Refusal::new(OP, format!("{a} with {b} do not meet"), help);
        let sharded = |layout: &Layout, axis| matches!(layout.placement(axis), Placement::Shard(_));
        if D < 2 || a.shape()[D - 1] != b.shape()[D - 2] || a.shape()[..D - 2] != b.shape()[..D - 2] {
            both("the shapes must be [..., m, k] and [..., k, n]").refuse();
        }
        if a.shards(D - 1) != b.shards(D - 2) {
            both("the contracted dimensions must be sharded alike: redistribute one of the factors").refuse();
        }
        let mut shape = a.shape().to_vec();
        shape[D - 1] = b.shape()[D - 1];
        let mut layout = Layout::replicated(shape);
        for dim in 0..D - 1 {
            if dim < D - 2 && a.shards(dim) != b.shards(dim) {
                both("the leading dimensions must be sharded alike: redistribute one of the factors").refuse();
            }
            for (axis, split) in a.shards(dim) {
                if dim == D - 2 && sharded(b, *axis) {
                    both("an axis may shard the rows of the left or the columns of the right factor, not both")
                        .refuse();
                }
                layout = layout.shard(dim, *axis, split.clone());
            }
        }
        for (axis, split) in b.shards(D - 1) {
            if sharded(a, *axis) {
                both("an axis may shard the rows of the left or the columns of the right factor, not both").refuse();
            }
            layout = layout.shard(D - 1, *axis, split.clone());
        }
        let mut layout = self.contracted(OP, &other, layout);
        for (axis, _) in self.layout().shards(D - 1) {
            layout = layout.partial(*axis);
        }
        self.with(other, layout, Tensor::matmul)
    }

    /// Sum over a dimension, which stays with length 1. Where axes shard it, the result is partial over them.
    ///
    /// # Shapes
    /// - returns the same, of length 1 in `dim`
    ///
    /// # Panics
    /// If there is no such dimension.
    #[track_caller]
    pub fn sum_dim(self, dim: usize) -> Self {
        let (local, layout, mesh) = self.into_parts();
        let axes: Vec<Axis> = layout.shards(dim).iter().map(|(axis, _)| *axis).collect();
        let mut shape = layout.shape().to_vec();
        shape[dim] = 1;
        let mut layout = layout;
        for _ in &axes {
            layout = layout.without_inner(dim);
        }
        let layout = axes.into_iter().fold(layout.with_shape(shape), Layout::partial);
        SpTensor::checked("sum_dim", local.sum_dim(dim), layout, mesh)
    }

    fn map(self, local: impl FnOnce(Tensor<D>) -> Tensor<D>) -> Self {
        let (tensor, layout, mesh) = self.into_parts();
        SpTensor::checked("map", local(tensor), layout, mesh)
    }

    #[track_caller]
    fn with(self, other: Self, layout: Layout, op: impl FnOnce(Tensor<D>, Tensor<D>) -> Tensor<D>) -> Self {
        let (left, _, mesh) = self.into_parts();
        let (right, _, _) = other.into_parts();
        SpTensor::checked("arithmetic", op(left, right), layout, mesh)
    }

    #[track_caller]
    fn same_shape_and_shards(&self, op: &'static str, other: &Self) {
        let (a, b) = (self.layout(), other.layout());
        if a.shape() != b.shape() || !a.same_shards(b) {
            Refusal::new(
                op,
                format!("the layouts {a} and {b} differ"),
                "give both the same shape and shards: redistribute one of them",
            )
            .refuse();
        }
    }

    #[track_caller]
    pub(crate) fn same_layout(&self, op: &'static str, other: &Self) {
        self.same_shape_and_shards(op, other);
        let (a, b) = (self.layout(), other.layout());
        if a.partial_axes() != b.partial_axes() {
            let axis = Axis::ALL
                .into_iter()
                .find(|axis| a.placement(*axis) != b.placement(*axis))
                .expect("the partial axes differ");
            let whole = if a.placement(axis) == Placement::Partial { b } else { a };
            Refusal::new(
                op,
                format!(
                    "{whole} added to a partial value would count {} times",
                    self.mesh().size(axis)
                ),
                format!(
                    "add up the partial value first with .redistribute(Axis::{axis:?}, Placement::Replicate), or make \
                     the other a term with .redistribute(Axis::{axis:?}, Placement::Partial)"
                ),
            )
            .refuse();
        }
    }

    /// The layout of a product: partial where one factor is, which the other must then hold whole.
    #[track_caller]
    fn contracted(&self, op: &'static str, other: &Self, layout: Layout) -> Layout {
        let (a, b) = (self.layout(), other.layout());
        let mut result = layout;
        for axis in Axis::ALL {
            match (a.placement(axis), b.placement(axis)) {
                (Placement::Partial, Placement::Replicate) | (Placement::Replicate, Placement::Partial) => {
                    result = result.partial(axis);
                }
                (Placement::Partial, _) | (_, Placement::Partial) => Refusal::new(
                    op,
                    format!("{a} with {b}: beside a partial factor the other must be replicated over {axis}"),
                    format!("add up the partial one first with .redistribute(Axis::{axis:?}, Placement::Replicate)"),
                )
                .refuse(),
                _ => {}
            }
        }
        result
    }
}

/// The operators are the methods, as with Burn's tensors.
macro_rules! operator {
    ($trait:ident, $method:ident) => {
        impl<const D: usize> std::ops::$trait for SpTensor<D> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: Self) -> Self {
                SpTensor::$method(self, other)
            }
        }
    };
}

operator!(Add, add);
operator!(Sub, sub);
operator!(Mul, mul);
