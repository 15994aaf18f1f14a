use burn::module::ParamId;
use burn::tensor::Tensor;

use super::super::shards::Cut;
use super::super::{ParamLayouts, ParamShards};
use crate::{SpDevice, SpTensor, layout::Layout};

/// How the ranks hold a tensor: sharded by a layout, and of what each holds then, maybe a flat part.
pub(super) struct Share {
    layout: Option<Layout>,
    cut: Option<Cut>,
}

impl Share {
    pub fn new(layout: Option<Layout>, cut: Option<Cut>) -> Self {
        Self { layout, cut }
    }

    /// That of a parameter.
    pub fn of(id: ParamId, layouts: &ParamLayouts, shards: &ParamShards) -> Self {
        match shards.cut(id) {
            Some((cut, layout)) => Self::new(layout.cloned(), Some(cut.clone())),
            None => Self::new(layouts.layout(id).cloned(), None),
        }
    }

    /// Whether every rank holds all of it.
    pub fn is_whole(&self) -> bool {
        self.layout.is_none() && self.cut.is_none()
    }

    /// The shape of the whole tensor, of which this rank holds a part of that shape.
    pub fn whole_shape(&self, own: &[usize]) -> Vec<usize> {
        match (&self.layout, &self.cut) {
            (Some(layout), _) => layout.shape().to_vec(),
            (None, Some(cut)) => cut.shape.clone(),
            (None, None) => own.to_vec(),
        }
    }

    /// The shape of this rank's part, of a tensor of `dims` dimensions; none if it depends on the tensor alone.
    pub fn own_shape(&self, dims: usize) -> Option<Vec<usize>> {
        self.cut.as_ref().map(|cut| {
            let mut shape = vec![1; dims];
            shape[0] = cut.own.len();
            shape
        })
    }

    /// Whether this rank holds none of it.
    pub fn is_nothing(&self) -> bool {
        self.cut.as_ref().is_some_and(|cut| cut.own.is_empty())
    }

    /// The whole tensor. Collective, unless every rank holds it.
    pub fn gather<const D: usize>(&self, own: Tensor<D>, device: &SpDevice) -> Tensor<D> {
        let local = match &self.cut {
            Some(cut) => cut.whole(own),
            None => own,
        };
        match &self.layout {
            Some(layout) => SpTensor::from_local(local, layout.clone(), device)
                .gather()
                .into_local(),
            None => local,
        }
    }

    /// This rank's part of the whole tensor.
    pub fn part<const D: usize>(&self, whole: Tensor<D>, device: &SpDevice) -> Tensor<D> {
        let local = match &self.layout {
            Some(layout) => device.distribute(whole, layout).into_local(),
            None => whole,
        };
        match &self.cut {
            Some(cut) => cut.part(local),
            None => local,
        }
    }
}
