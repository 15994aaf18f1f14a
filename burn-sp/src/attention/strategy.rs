use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_sp_comm::Site;

use super::{gather_kv::GatherKv, local::Local, ulysses::Ulysses};
use crate::tensor::SpBackend;

/// What a strategy keeps for backward: this rank's share, and nothing that travelled to reach it.
#[derive(Clone, Debug)]
pub(crate) struct Saved<B: SpBackend> {
    pub q: FloatTensor<B>,
    pub k: FloatTensor<B>,
    pub v: FloatTensor<B>,
    pub out: FloatTensor<B>,
    pub lse: FloatTensor<B>,
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
    /// Tokens are exchanged for heads, and another strategy runs inside.
    Ulysses(Box<Ulysses>),
}

impl Strategy {
    /// The output, and what backward needs. `[batch, tokens, heads, head_dim]` in and out.
    pub fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, Saved<B>) {
        match self {
            Strategy::Local(strategy) => strategy.forward(q, k, v),
            Strategy::GatherKv(strategy) => strategy.forward(q, k, v, site),
            Strategy::Ulysses(strategy) => strategy.forward(q, k, v, site),
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
        match self {
            Strategy::Local(strategy) => strategy.backward(saved, grad, wide),
            Strategy::GatherKv(strategy) => strategy.backward(saved, grad, wide, site),
            Strategy::Ulysses(strategy) => strategy.backward(saved, grad, site),
        }
    }
}

/// One attention call, decided: the payload of the attention node.
#[derive(Clone, Debug)]
pub struct AttentionCall {
    pub(crate) strategy: Strategy,
    pub(crate) site: Site,
}

impl AttentionCall {
    pub(crate) fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
    ) -> (FloatTensor<B>, Saved<B>) {
        self.strategy.forward(q, k, v, self.site)
    }

    pub(crate) fn backward<B: SpBackend>(
        &self,
        saved: Saved<B>,
        grad: FloatTensor<B>,
        dtypes: [DType; 3],
    ) -> Gradients3<B> {
        let (dq, dk, dv) = self.strategy.backward(saved, grad, false, self.site.backward());
        (
            cast::<B>(dq, dtypes[0]),
            cast::<B>(dk, dtypes[1]),
            cast::<B>(dv, dtypes[2]),
        )
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
