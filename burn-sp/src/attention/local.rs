//! Every key is on this rank: the fused kernel alone.

use burn::backend::tensor::FloatTensor;
use kernels_cubecl::AttentionSpec;

use super::strategy::{Gradients3, Saved};
use crate::tensor::SpBackend;

#[derive(Clone, Debug)]
pub(crate) struct Local {
    pub spec: AttentionSpec,
}

impl Local {
    pub fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
    ) -> (FloatTensor<B>, Saved<B>) {
        let (out, stats) = B::attention_forward(q.clone(), k.clone(), v.clone(), &self.spec);
        (out.clone(), Saved { q, k, v, out, stats })
    }

    pub fn backward<B: SpBackend>(&self, saved: Saved<B>, grad: FloatTensor<B>, wide: bool) -> Gradients3<B> {
        let Saved { q, k, v, out, stats } = saved;
        B::attention_backward(
            q,
            k,
            v,
            out,
            stats,
            grad,
            &AttentionSpec {
                wide,
                ..self.spec.clone()
            },
        )
    }
}
