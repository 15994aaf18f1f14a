//! Keys and values are gathered over an axis for the time of the kernel, in one message; backward gathers them again
//! and scatters their gradients home. Queries stay where they are, so any head count works.

use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::tensor::Float;
use burn_sp_comm::{Collective, Communicator, Parts, Site};
use kernels_cubecl::AttentionSpec;

use super::strategy::{Gradients3, Saved};
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

    pub fn backward<B: SpBackend>(&self, saved: Saved<B>, grad: FloatTensor<B>, site: Site) -> Gradients3<B> {
        let Saved { q, k, v, out, stats } = saved;
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
        let [dk, dv] = exchange::<B, Float, _>([(scatter(), dk), (scatter(), dv)], self.comm.as_ref(), site);
        (dq, dk, dv)
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
        let [k, v] = exchange::<B, Float, _>([(gather(), k), (gather(), v)], self.comm.as_ref(), site);
        (k, v)
    }
}
