use std::ops::Range;

use burn::tensor::{Float, Tensor};
use burn_sp_comm::{Parts, Site, raise};

use super::{
    Refusal, SpKind, SpTensor,
    transition::{Place, Transition},
};
use crate::layout::{Axis, Split, Window};

/// What a rank computes of a [windowed](SpTensor::windowed) layer, in global positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowPart {
    /// The outputs, those whose newest input is the rank's own.
    pub outputs: Range<usize>,
    /// The inputs that these read, of those that there are.
    pub reads: Range<usize>,
    /// How many inputs the first output reads from before the start, where there are none.
    pub missing: usize,
}

impl<const D: usize> SpTensor<D> {
    /// Does to each position of `dim` what needs it and some positions before it, such as a causal convolution does in
    /// time: the closure gets the inputs that this rank's outputs read, its own and those of the ranks before it (its
    /// halo), and returns the outputs. An output belongs to the rank that holds its newest input; one that reads nothing
    /// before its own inputs exchanges nothing.
    ///
    /// Differentiable: an input that several ranks read gets the sum of their gradients, at its owner. A rank may hold
    /// fewer inputs than the window reaches back, or none; without outputs it gets no inputs, and returns none.
    ///
    /// Backward runs exchanges by their depth in the graph. Where two do not depend on each other, the closures between
    /// them and their common input must be of equal depth on all ranks.
    ///
    /// One axis may shard `dim`, into one range a rank. With a mesh of its own
    /// ([`Mesh::new`](crate::layout::Mesh::new)), a model can have all ranks on one axis.
    ///
    /// # Shapes
    /// - `body` gets `part.reads` along `dim` and returns `part.outputs`; the other sharded dimensions stay as they are
    ///
    /// # Panics
    /// If the tensor is partial, `dim` is sharded otherwise, or the closure returns other positions of `dim` than this
    /// rank's outputs or changes another sharded dimension.
    #[track_caller]
    pub fn windowed(self, dim: usize, window: Window, body: impl FnOnce(Tensor<D>, &WindowPart) -> Tensor<D>) -> Self {
        const OP: &str = "windowed";
        self.refuse_partial(OP);
        let shard = self.one_shard(OP, dim);
        let (axis, rank, own) = match &shard {
            Some((axis, parts)) => (
                Some(*axis),
                self.mesh().coordinate(*axis),
                self.one_range_each(OP, dim, parts),
            ),
            None => (None, 0, vec![0..self.global_shape()[dim]]),
        };
        let outputs: Vec<_> = own.iter().cloned().map(|own| window.outputs(own)).collect();
        let fetched = window.fetched(&own);
        let held = fetched.of(rank)[0].clone();
        let part = WindowPart {
            outputs: outputs[rank].clone(),
            reads: window.reads(outputs[rank].clone()),
            missing: window.missing(outputs[rank].start),
        };

        let (mut local, layout, mesh) = self.into_parts();
        if let Some((axis, parts)) = shard
            && own
                .iter()
                .enumerate()
                .any(|(rank, own)| fetched.of(rank) != [own.clone()])
        {
            let halo = Transition {
                from: Place::Shard { dim, parts },
                to: Place::Shard { dim, parts: fetched },
                comm: mesh.group(&[axis]).unwrap_or_else(|error| raise(error)),
                site: Site::here(),
            };
            local = Float::transition(local, halo);
        }
        let before = local.dims();
        let out = if part.outputs.is_empty() {
            // Burn cuts what is empty off its graph, but others wait for this rank's backward.
            let out = body(local.clone().slice_dim(dim, 0..0), &part);
            out + local.sum().reshape([1; D])
        } else {
            let from = part.reads.start - held.start;
            body(local.narrow(dim, from, part.reads.len()), &part)
        };

        let mut expected = out.dims();
        let mut shape = out.dims().to_vec();
        for other in (0..D).filter(|other| !layout.shards(*other).is_empty()) {
            expected[other] = before[other];
            shape[other] = layout.shape()[other];
        }
        expected[dim] = part.outputs.len();
        if out.dims() != expected {
            Refusal::new(
                OP,
                format!("of {layout}, {before:?} became {:?}", out.dims()),
                format!("return this rank's outputs, which are {expected:?}"),
            )
            .refuse();
        }
        shape[dim] = outputs.iter().map(|outputs| outputs.len()).sum();
        let layout = match axis {
            Some(axis) if outputs != own => {
                let split = Split::ranges(outputs);
                layout.without_inner(dim).with_shape(shape).shard(dim, axis, split)
            }
            _ => layout.with_shape(shape),
        };
        SpTensor::checked(OP, out, layout, mesh)
    }

    /// The axis that shards `dim`, with its parts.
    #[track_caller]
    fn one_shard(&self, operation: &'static str, dim: usize) -> Option<(Axis, Parts)> {
        match self.layout().shards(dim) {
            [] => None,
            [(axis, _)] => Some((*axis, self.layout().inner_parts(dim, self.mesh()))),
            [.., (inner, _)] => Refusal::new(
                operation,
                format!("several axes shard dimension {dim} of {}", self.layout()),
                format!("redistribute {inner} first, or give the ranks a mesh with one axis"),
            )
            .refuse(),
        }
    }

    /// The one range that each rank holds; at the start if it is empty, wherever that was.
    #[track_caller]
    fn one_range_each(&self, operation: &'static str, dim: usize, parts: &Parts) -> Vec<Range<usize>> {
        let range = |rank: usize| {
            let mut ranges = parts.of(rank).iter().filter(|range| !range.is_empty());
            let first = ranges.next().cloned().unwrap_or_default();
            if ranges.next().is_some() {
                Refusal::new(
                    operation,
                    format!(
                        "rank {rank} of the axis holds several ranges of dimension {dim} of {}",
                        self.layout()
                    ),
                    "shard it with Split::Contiguous",
                )
                .refuse();
            }
            first
        };
        (0..parts.ranks()).map(range).collect()
    }
}
