use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn_sp_comm::{Collective, Communicator, Parts, Site};

use super::{
    SpBackend,
    kind::{Primitive, exchange, place, select},
};

/// A placement on one axis, with the parts that a sharded dimension is cut into.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Place {
    Shard { dim: usize, parts: Parts },
    Replicate,
    Partial,
}

impl Place {
    /// The placement of the gradient; see [`Placement::dual`](crate::layout::Placement::dual).
    fn dual(&self) -> Place {
        match self {
            Place::Shard { .. } => self.clone(),
            Place::Replicate => Place::Partial,
            Place::Partial => Place::Replicate,
        }
    }
}

/// A change of placement on one axis: the payload of the one layout node.
#[derive(Clone, Debug)]
pub struct Transition {
    pub(crate) from: Place,
    pub(crate) to: Place,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) site: Site,
}

impl Transition {
    /// What the gradient goes through. This is the whole backward of every layout change: the same table, read again.
    pub(crate) fn backward(&self) -> Transition {
        Transition {
            from: self.to.dual(),
            to: self.from.dual(),
            comm: self.comm.clone(),
            site: self.site.backward(),
        }
    }

    /// The table of layout changes, on plain tensors.
    pub(crate) fn run<B: SpBackend, K: Primitive<B>>(&self, tensor: K::Tensor) -> K::Tensor {
        use Place::{Partial, Replicate, Shard};
        let rank = self.comm.rank();
        let communicate = |tensor, op| {
            let [out] = exchange::<B, K, _>([(op, tensor)], self.comm.as_ref(), self.site);
            out
        };
        match (self.from.clone(), self.to.clone()) {
            (Replicate, Replicate) | (Partial, Partial) => tensor,
            (Shard { dim, parts }, Replicate) => communicate(tensor, Collective::AllGather { dim, parts }),
            (Partial, Shard { dim, parts }) => communicate(tensor, Collective::ReduceScatter { dim, parts }),
            (Partial, Replicate) => communicate(tensor, Collective::AllReduce),
            (
                Shard {
                    dim: gather_dim,
                    parts: gather_parts,
                },
                Shard {
                    dim: scatter_dim,
                    parts: scatter_parts,
                },
            ) => communicate(
                tensor,
                Collective::AllToAll {
                    gather_dim,
                    gather_parts,
                    scatter_dim,
                    scatter_parts,
                },
            ),
            (Replicate, Shard { dim, parts }) => select::<B, K>(tensor, dim, parts.of(rank)),
            (Shard { dim, parts }, Partial) => place::<B, K>(tensor, dim, parts.extent(), parts.of(rank)),
            (Replicate, Partial) if rank == 0 => tensor,
            (Replicate, Partial) => K::zeros(tensor.shape().to_vec(), &tensor),
        }
    }
}
