use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Float};
use burn_sp_comm::Site;

use super::{gather_kv::GatherKv, local::Local, pass_q::PassQ, ring::Ring, ulysses::Ulysses};
use crate::tensor::{SpBackend, place, select};

pub(crate) const HEADS: usize = 2;

/// What a strategy keeps for backward: this rank's share, and nothing that travelled to reach it.
#[derive(Clone, Debug)]
pub(crate) struct Saved<B: SpBackend> {
    pub q: FloatTensor<B>,
    pub k: FloatTensor<B>,
    pub v: FloatTensor<B>,
    pub out: FloatTensor<B>,
    pub stats: FloatTensor<B>,
}

/// Gradients of queries, keys and values.
pub(crate) type Gradients3<B> = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>);

/// How queries meet the keys that other ranks own.
#[derive(Clone, Debug)]
pub(crate) enum Strategy {
    /// They need none: every key is here.
    Local(Local),
    /// Keys and values are gathered over an axis.
    GatherKv(GatherKv),
    /// Keys and values travel around an axis.
    Ring(Ring),
    /// Tokens are exchanged for heads, and another strategy runs inside.
    Ulysses(Box<Ulysses>),
    /// Every rank attends to the keys that it keeps, for all. Without a backward pass.
    PassQ(PassQ),
}

impl Strategy {
    fn name(&self) -> &'static str {
        match self {
            Strategy::Local(_) => "local",
            Strategy::GatherKv(_) => "gather_kv",
            Strategy::Ring(_) => "ring",
            Strategy::Ulysses(_) => "ulysses",
            Strategy::PassQ(_) => "pass_q",
        }
    }

    /// The output, and what backward needs. `[batch, tokens, heads, head_dim]` in and out.
    pub fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, Saved<B>) {
        let _span = tracing::trace_span!("attention forward", strategy = self.name()).entered();
        match self {
            Strategy::Local(strategy) => strategy.forward(q, k, v),
            Strategy::GatherKv(strategy) => strategy.forward(q, k, v, site),
            Strategy::Ring(strategy) => strategy.forward(q, k, v, site),
            Strategy::Ulysses(strategy) => strategy.forward(q, k, v, site),
            Strategy::PassQ(strategy) => strategy.forward(q, k, v, site),
        }
    }

    /// The gradients; in the accumulation dtype if `wide`, for a caller that still adds to them.
    pub fn backward<B: SpBackend>(
        &self,
        saved: Saved<B>,
        grad: FloatTensor<B>,
        wide: bool,
        site: Site,
    ) -> Gradients3<B> {
        let _span = tracing::trace_span!("attention backward", strategy = self.name()).entered();
        let dtypes = [saved.q.dtype(), saved.k.dtype(), saved.v.dtype()];
        let (dq, dk, dv) = match self {
            Strategy::Local(strategy) => strategy.backward(saved, grad, wide),
            Strategy::GatherKv(strategy) => strategy.backward(saved, grad, site),
            Strategy::Ring(strategy) => strategy.backward(saved, grad, site),
            Strategy::Ulysses(strategy) => strategy.backward(saved, grad, site),
            Strategy::PassQ(_) => unreachable!("cached attention refuses autodiff devices"),
        };
        if wide {
            return (dq, dk, dv);
        }
        (
            cast::<B>(dq, dtypes[0]),
            cast::<B>(dk, dtypes[1]),
            cast::<B>(dv, dtypes[2]),
        )
    }
}

/// One attention call, decided: the payload of the attention node.
#[derive(Clone, Debug)]
pub struct AttentionCall {
    pub(crate) strategy: Strategy,
    /// The key/value heads that this rank's query heads read, where it holds more.
    pub(crate) kv_heads: Option<Range<usize>>,
    pub(crate) site: Site,
}

impl AttentionCall {
    pub(crate) fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
    ) -> (FloatTensor<B>, Saved<B>) {
        let read = |tensor| match &self.kv_heads {
            Some(range) => select::<B, Float>(tensor, HEADS, std::slice::from_ref(range)),
            None => tensor,
        };
        self.strategy.forward(q, read(k), read(v), self.site)
    }

    /// The gradients; `held` is how many key/value heads this rank holds.
    pub(crate) fn backward<B: SpBackend>(&self, saved: Saved<B>, grad: FloatTensor<B>, held: usize) -> Gradients3<B> {
        let (dq, dk, dv) = self.strategy.backward(saved, grad, false, self.site.backward());
        // Heads that were not read here get their gradients from other ranks.
        let all = |tensor| match &self.kv_heads {
            Some(range) => place::<B, Float>(tensor, HEADS, held, std::slice::from_ref(range)),
            None => tensor,
        };
        (dq, all(dk), all(dv))
    }
}

/// The tensor in another float dtype; itself if it has it.
pub(crate) fn cast<B: SpBackend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        B::float_cast(tensor, dtype.into())
    }
}
