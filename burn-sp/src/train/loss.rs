use std::sync::Arc;

use burn::tensor::{Gradients, Int, Tensor};
use burn_sp_comm::{Collective, Site, raise};

use super::clip::exchange_f64;
use crate::{
    SpTensor,
    layout::{Axis, Layout, Mesh, Placement},
    tensor::Refusal,
};

/// This rank's share of a loss: its own terms, divided by the *global* count. The shares of all ranks add up to the loss,
/// and each rank differentiates its own.
///
/// There is no way to make one from a loss that every rank computes alike: differentiated everywhere, it would give
/// gradients as many times too large as there are ranks.
#[derive(Clone, Debug)]
pub struct LossShare {
    share: Tensor<1>,
    mesh: Arc<Mesh>,
}

impl LossShare {
    /// The share of a loss `sum of terms / count`. On axes where every rank holds the same terms, one rank keeps them.
    ///
    /// `count` is of tokens, or whatever the loss is a mean over, and global: over all ranks, and over all micro-steps
    /// if gradients are accumulated. A count of 0 counts as 1.
    ///
    /// # Shapes
    /// - `terms`: any; all their elements are added up
    ///
    /// # Panics
    /// If the terms are partial: a term of a term is no loss.
    #[track_caller]
    pub fn new<const D: usize>(terms: SpTensor<D>, count: u64) -> Self {
        terms.refuse_partial("LossShare::new");
        let (local, layout, mesh) = terms.into_parts();
        Self::from_local_sum(local.sum().mul_scalar(1.0 / count.max(1) as f64), &layout, mesh)
    }

    /// The mean over all elements, of all ranks.
    ///
    /// # Shapes
    /// - `terms`: any
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[track_caller]
    pub fn mean<const D: usize>(terms: SpTensor<D>) -> Self {
        let count = terms.global_shape().iter().product::<usize>();
        Self::new(terms, count as u64)
    }

    /// From the sum over a local tensor of that layout.
    #[track_caller]
    pub(super) fn from_local_sum(sum: Tensor<1>, layout: &Layout, mesh: Arc<Mesh>) -> Self {
        let whole = |axis: &Axis| layout.placement(*axis) == Placement::Replicate;
        let held = Axis::ALL
            .into_iter()
            .filter(|axis| !whole(axis))
            .fold(Layout::replicated([1]), Layout::partial);
        let mut share = SpTensor::checked("LossShare", sum, held, mesh.clone());
        for axis in Axis::ALL.into_iter().filter(whole) {
            share = share.redistribute(axis, Placement::Partial);
        }
        Self {
            share: share.into_partial_term(&Axis::ALL),
            mesh,
        }
    }

    /// Adds another loss, such as an auxiliary one.
    #[allow(clippy::should_implement_trait)]
    pub fn add(self, other: LossShare) -> Self {
        Self {
            share: self.share + other.share,
            mesh: self.mesh,
        }
    }

    /// Multiplies the loss by a constant.
    pub fn scale(self, factor: f64) -> Self {
        Self {
            share: self.share.mul_scalar(factor),
            mesh: self.mesh,
        }
    }

    /// Differentiates this rank's share. Gradients of replicated parameters are then partial:
    /// [`sum_gradients`](super::sum_gradients) adds them up.
    ///
    /// # Panics
    /// If nothing that the loss was computed from is tracked on an autodiff device.
    pub fn backward(&self) -> Gradients {
        self.share.backward()
    }

    /// The loss itself, for display: the sum of all ranks' shares, outside the autodiff graph. Collective.
    #[track_caller]
    pub fn value(&self) -> f64 {
        let local = self.share.to_data().iter::<f64>().sum();
        sum_over(&self.mesh, &Axis::ALL, local, Site::here())
    }
}

/// How many labels of all ranks and micro-batches are not ignored (negative). Collective.
///
/// # Shapes
/// - `labels`: `[batch, tokens]`, one for each micro-batch, all sharded over the same axes
///
/// # Panics
/// If they are not, or are partial.
#[track_caller]
pub fn valid_tokens<'a>(labels: impl IntoIterator<Item = &'a SpTensor<2, Int>>) -> u64 {
    let mut local = 0;
    let mut held: Option<(Arc<Mesh>, Vec<Axis>)> = None;
    for labels in labels {
        labels.refuse_partial("valid_tokens");
        local += labels
            .local()
            .to_data()
            .iter::<i64>()
            .filter(|label| *label >= 0)
            .count();
        let sharded = |axis: &Axis| matches!(labels.layout().placement(*axis), Placement::Shard(_));
        let axes: Vec<Axis> = Axis::ALL.into_iter().filter(sharded).collect();
        match &held {
            Some((_, others)) if *others != axes => Refusal::new(
                "valid_tokens",
                format!("micro-batches are sharded over {others:?} and over {axes:?}"),
                "shard all micro-batches alike",
            )
            .refuse(),
            _ => held = Some((labels.mesh().clone(), axes)),
        }
    }
    held.map_or(0, |(mesh, axes)| {
        sum_over(&mesh, &axes, local as f64, Site::here()) as u64
    })
}

fn sum_over(mesh: &Mesh, axes: &[Axis], value: f64, site: Site) -> f64 {
    let axes: Vec<Axis> = axes.iter().copied().filter(|axis| mesh.size(*axis) > 1).collect();
    if axes.is_empty() {
        return value;
    }
    let comm = mesh.group(&axes).unwrap_or_else(|error| raise(error));
    exchange_f64(Collective::AllReduce, value, comm.as_ref(), site)
}
