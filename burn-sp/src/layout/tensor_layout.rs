use std::{fmt, ops::Range};

use burn_sp_comm::Parts;

use super::{Axis, Mesh, Placement, Split};

/// How a global tensor lies on a mesh: for each dimension the axes that shard it, outermost first, each with its
/// split, and the axes on which it is a sum of terms. On every other axis it is replicated.
///
/// An inner axis splits the list of positions that the outer axes leave to this rank.
///
/// # Example
/// ```
/// use burn::tensor::Device;
/// use burn_sp::prelude::*;
///
/// // 8 tokens: zigzag over ring, and what that leaves to a rank once more over ulysses.
/// let layout = Layout::replicated([8, 16])
///     .shard(0, Axis::Ring, Split::Zigzag)
///     .shard(0, Axis::Ulysses, Split::Contiguous);
/// assert_eq!(layout.placement(Axis::Ring), Placement::Shard(0));
/// assert_eq!(layout.placement(Axis::Tp), Placement::Replicate);
///
/// let config = LaunchConfig::new(MeshShape::ring(2).with_ulysses(2));
/// let held = launch(&config, &Device::flex(), |device: SpDevice| {
///     assert_eq!(layout.local_shape(device.mesh()), [2, 16]);
///     layout.positions(0, device.mesh())
/// })?;
/// assert_eq!(held, [[0..2], [6..8], [2..4], [4..6]]);
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Vec<usize>,
    shards: Vec<Vec<(Axis, Split)>>,
    partial: Vec<Axis>,
}

impl Layout {
    /// A tensor of this global shape that every rank holds whole.
    pub fn replicated(shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        Self {
            shards: vec![Vec::new(); shape.len()],
            shape,
            partial: Vec::new(),
        }
    }

    /// Also shards `dim` over `axis`, inside the axes that shard it already.
    ///
    /// # Panics
    /// If there is no such dimension, or the axis is in use already.
    pub fn shard(mut self, dim: usize, axis: Axis, split: Split) -> Self {
        assert!(dim < self.shape.len(), "layout: no dimension {dim} in {self}");
        assert!(
            self.placement(axis) == Placement::Replicate,
            "layout: {axis} already holds {self}; one axis has one placement"
        );
        self.shards[dim].push((axis, split));
        self
    }

    /// Also makes the tensor a sum of terms over `axis`.
    ///
    /// # Panics
    /// If the axis is in use already.
    pub fn partial(mut self, axis: Axis) -> Self {
        assert!(
            self.placement(axis) == Placement::Replicate,
            "layout: {axis} already holds {self}; one axis has one placement"
        );
        self.partial.push(axis);
        self.partial.sort();
        self
    }

    /// The shape of the whole tensor, in elements.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The axes that shard `dim`, outermost first.
    ///
    /// # Panics
    /// If there is no such dimension.
    pub fn shards(&self, dim: usize) -> &[(Axis, Split)] {
        &self.shards[dim]
    }

    /// The axes on which the tensor is a sum of terms.
    pub fn partial_axes(&self) -> &[Axis] {
        &self.partial
    }

    /// The placement on one axis.
    pub fn placement(&self, axis: Axis) -> Placement {
        if self.partial.contains(&axis) {
            return Placement::Partial;
        }
        let sharded = |dim: &usize| self.shards[*dim].iter().any(|(other, _)| *other == axis);
        (0..self.shape.len())
            .find(sharded)
            .map_or(Placement::Replicate, Placement::Shard)
    }

    /// The global positions of `dim` that this rank holds, in local order.
    ///
    /// # Panics
    /// If there is no such dimension, or an explicit split is for another length or number of ranks.
    pub fn positions(&self, dim: usize, mesh: &Mesh) -> Vec<Range<usize>> {
        self.shards[dim]
            .iter()
            .fold(vec![0..self.shape[dim]], |owned, (axis, split)| {
                let len = owned.iter().map(|range| range.len()).sum();
                let parts = split.parts(len, mesh.size(*axis));
                select(&owned, parts.of(mesh.coordinate(*axis)))
            })
    }

    /// The parts by which the innermost axis of `dim` splits what the outer axes leave to this rank, as indices into
    /// that list.
    ///
    /// # Panics
    /// If no axis shards `dim`.
    pub(crate) fn inner_parts(&self, dim: usize, mesh: &Mesh) -> Parts {
        let (axis, split) = self.shards[dim].last().expect("the dimension is sharded");
        split.parts(self.without_inner(dim).local_len(dim, mesh), mesh.size(*axis))
    }

    /// The positions of `dim` of every rank of the group of the axes that shard it, in the order of that group.
    ///
    /// # Panics
    /// If an axis is outside of one that comes before it on the mesh: groups are ordered by rank.
    pub(crate) fn all_parts(&self, dim: usize, mesh: &Mesh) -> Parts {
        let shards = &self.shards[dim];
        assert!(
            shards.is_sorted_by_key(|(axis, _)| *axis),
            "layout: {self} is not ordered as the mesh"
        );
        let parts = shards
            .iter()
            .fold(vec![vec![0..self.shape[dim]]], |owned, (axis, split)| {
                let inner = owned.iter().flat_map(|owned| {
                    let len = owned.iter().map(|range| range.len()).sum();
                    let parts = split.parts(len, mesh.size(*axis));
                    (0..parts.ranks()).map(move |rank| select(owned, parts.of(rank)))
                });
                inner.collect()
            });
        Parts::new(parts)
    }

    /// How many positions of `dim` this rank holds.
    ///
    /// # Panics
    /// If there is no such dimension, or an explicit split is for another length or number of ranks.
    pub fn local_len(&self, dim: usize, mesh: &Mesh) -> usize {
        self.positions(dim, mesh).iter().map(|range| range.len()).sum()
    }

    /// The shape of this rank's local tensor.
    ///
    /// # Panics
    /// If an explicit split is for another length or number of ranks.
    pub fn local_shape(&self, mesh: &Mesh) -> Vec<usize> {
        (0..self.shape.len()).map(|dim| self.local_len(dim, mesh)).collect()
    }

    /// The same layout for another global shape; sharded dimensions must keep their length.
    pub(crate) fn with_shape(mut self, shape: Vec<usize>) -> Self {
        self.shards.resize(shape.len(), Vec::new());
        self.shape = shape;
        self
    }

    /// The layout without the innermost axis of `dim`.
    pub(crate) fn without_inner(&self, dim: usize) -> Self {
        let mut layout = self.clone();
        layout.shards[dim].pop();
        layout
    }

    /// The layout without a partial axis.
    pub(crate) fn without_partial(&self, axis: Axis) -> Self {
        let mut layout = self.clone();
        layout.partial.retain(|other| *other != axis);
        layout
    }

    /// The layout without the axes that have one rank, which split nothing.
    pub(crate) fn without_single(&self, mesh: &Mesh) -> Self {
        let mut layout = self.clone();
        for shards in &mut layout.shards {
            shards.retain(|(axis, _)| mesh.size(*axis) > 1);
        }
        layout.partial.retain(|axis| mesh.size(*axis) > 1);
        layout
    }

    /// The layout without its partial axes.
    pub(crate) fn without_partials(mut self) -> Self {
        self.partial.clear();
        self
    }

    /// The layout with two dimensions swapped.
    pub(crate) fn swap_dims(mut self, a: usize, b: usize) -> Self {
        self.shape.swap(a, b);
        self.shards.swap(a, b);
        self
    }

    /// Whether the axes shard the same dimensions in the same way, whatever the shapes.
    pub(crate) fn same_shards(&self, other: &Layout) -> bool {
        self.shards == other.shards
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, len) in self.shape.iter().enumerate() {
            write!(f, "{}{len}", if dim > 0 { ", " } else { "" })?;
            for (axis, split) in &self.shards[dim] {
                write!(f, " / {axis}")?;
                if *split != Split::Contiguous {
                    write!(f, " {split}")?;
                }
            }
        }
        f.write_str("]")?;
        for (index, axis) in self.partial.iter().enumerate() {
            write!(f, "{} {axis}", if index == 0 { " partial over" } else { "," })?;
        }
        Ok(())
    }
}

/// The part of an ordered list of global ranges that the given ranges of list indices name.
fn select(owned: &[Range<usize>], indices: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut selected: Vec<Range<usize>> = Vec::new();
    for wanted in indices {
        let mut before = 0;
        for range in owned {
            let from = wanted.start.max(before);
            let to = wanted.end.min(before + range.len());
            if from < to {
                let global = range.start + from - before..range.start + to - before;
                match selected.last_mut() {
                    Some(last) if last.end == global.start => last.end = global.end,
                    _ => selected.push(global),
                }
            }
            before += range.len();
        }
    }
    selected
}
