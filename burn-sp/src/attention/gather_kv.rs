//! Keys and values are gathered over an axis for the time of the kernel, in one message; backward gathers them again
//! and scatters their gradients home. Queries stay where they are, so any head count works.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Float;
use burn_sp_comm::{Collective, Communicator, Parts, Site};
use kernels_cubecl::AttentionSpec;

use super::strategy::{Gradients3, Saved, cast};
use crate::tensor::{SpBackend, exchange};

#[derive(Clone, Debug)]
pub(crate) struct GatherKv {
    pub comm: Arc<dyn Communicator>,
    /// Who owns which tokens.
    pub tokens: Parts,
    /// The keys' positions are those of all tokens of the group.
    pub spec: AttentionSpec,
}

impl GatherKv {
    pub fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, Saved<B>) {
        let (all_k, all_v) = self.gather::<B>(k.clone(), v.clone(), site);
        let (out, stats) = B::attention_forward(q.clone(), all_k, all_v, &self.spec);
        (out.clone(), Saved { q, k, v, out, stats })
    }

    pub fn backward<B: SpBackend>(
        &self,
        saved: Saved<B>,
        grad: FloatTensor<B>,
        wide: bool,
        site: Site,
    ) -> Gradients3<B> {
        let Saved { q, k, v, out, stats } = saved;
        let dtypes = [q.dtype(), k.dtype(), v.dtype()];
        let (all_k, all_v) = self.gather::<B>(k, v, site);
        // The ranks' terms of dk and dv are added in the accumulation dtype and rounded once.
        let spec = AttentionSpec {
            wide: true,
            ..self.spec.clone()
        };
        let (dq, dk, dv) = B::attention_backward(q, all_k, all_v, out, stats, grad, &spec);
        let scatter = || Collective::ReduceScatter {
            dim: 1,
            parts: self.tokens.clone(),
        };
        let mut own = exchange::<B, Float>(vec![(scatter(), dk), (scatter(), dv)], self.comm.as_ref(), site);
        let (dv, dk) = (own.remove(1), own.remove(0));
        if wide {
            return (dq, dk, dv);
        }
        (
            cast::<B>(dq, dtypes[0]),
            cast::<B>(dk, dtypes[1]),
            cast::<B>(dv, dtypes[2]),
        )
    }

    fn gather<B: SpBackend>(
        &self,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let gather = || Collective::AllGather {
            dim: 1,
            parts: self.tokens.clone(),
        };
        let mut all = exchange::<B, Float>(vec![(gather(), k), (gather(), v)], self.comm.as_ref(), site);
        let (v, k) = (all.remove(1), all.remove(0));
        (k, v)
    }
}
