//! Tokens are exchanged for heads (DeepSpeed-Ulysses, arXiv 2309.14509): one all-to-all of q, k and v packed in one
//! message, attention over all tokens for a slice of the heads, one all-to-all back. Any head count works: heads are
//! split unevenly if need be, and a key/value head that several ranks need goes to each of them; their gradients of it
//! are added.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Float;
use burn_sp_comm::{Collective, Communicator, Parts, Site};

use super::strategy::{Gradients3, Saved, Strategy};
use crate::tensor::{SpBackend, exchange};

#[derive(Clone, Debug)]
pub(crate) struct Ulysses {
    pub comm: Arc<dyn Communicator>,
    /// Who owns which tokens outside.
    pub tokens: Parts,
    /// Who attends with which query heads.
    pub heads: Parts,
    /// The key/value heads that those read; these overlap where several ranks read one.
    pub kv_heads: Parts,
    /// What runs on the exchanged tensors.
    pub inner: Strategy,
}

impl Ulysses {
    pub fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, Saved<B>) {
        let packed = [
            (self.to_heads(&self.heads), q),
            (self.to_heads(&self.kv_heads), k),
            (self.to_heads(&self.kv_heads), v),
        ];
        let [q, k, v] = exchange::<B, Float, _>(packed, self.comm.as_ref(), site);
        let (out, saved) = self.inner.forward::<B>(q, k, v, site);
        let [out] = exchange::<B, Float, _>([(self.to_tokens(&self.heads), out)], self.comm.as_ref(), site);
        (out, saved)
    }

    pub fn backward<B: SpBackend>(&self, saved: Saved<B>, grad: FloatTensor<B>, site: Site) -> Gradients3<B> {
        let [grad] = exchange::<B, Float, _>([(self.to_heads(&self.heads), grad)], self.comm.as_ref(), site);
        // Where ranks share a key/value head, the exchange adds their terms: in the accumulation dtype.
        let shared = (0..self.comm.size())
            .map(|rank| self.kv_heads.len_of(rank))
            .sum::<usize>()
            > self.kv_heads.extent();
        let dtype = saved.q.dtype();
        let (dq, dk, dv) = self.inner.backward::<B>(saved, grad, shared, site);
        let dq = super::strategy::cast::<B>(dq, dtype);
        let packed = [
            (self.to_tokens(&self.heads), dq),
            (self.to_tokens(&self.kv_heads), dk),
            (self.to_tokens(&self.kv_heads), dv),
        ];
        let [dq, dk, dv] = exchange::<B, Float, _>(packed, self.comm.as_ref(), site);
        (dq, dk, dv)
    }

    fn to_heads(&self, heads: &Parts) -> Collective {
        Collective::AllToAll {
            gather_dim: 1,
            gather_parts: self.tokens.clone(),
            scatter_dim: 2,
            scatter_parts: heads.clone(),
        }
    }

    fn to_tokens(&self, heads: &Parts) -> Collective {
        Collective::AllToAll {
            gather_dim: 2,
            gather_parts: heads.clone(),
            scatter_dim: 1,
            scatter_parts: self.tokens.clone(),
        }
    }
}
