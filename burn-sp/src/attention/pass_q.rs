//! Keys and values stay where they are, and the queries, of few tokens, go to every rank (pass-Q of "Context Parallelism
//! for Scalable Million-Token Inference", arXiv 2411.01783): each attends to its own keys, and what all of them find for a
//! query is merged by its softmax statistics. So what travels does not depend on the number of keys. Forward only.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Float;
use burn_sp_comm::{Collective, Communicator, Parts, Site};
use kernels_cubecl::AttentionSpec;

use super::strategy::{Saved, cast};
use crate::tensor::{SpBackend, exchange, select};

const BATCH: usize = 0;
const TOKENS: usize = 1;
/// Of the statistics, `[2, batch, heads, queries]`.
const STATS_BATCH: usize = 1;
const STATS_TOKENS: usize = 3;

#[derive(Clone, Debug)]
pub(crate) struct PassQ {
    pub comm: Arc<dyn Communicator>,
    /// Who owns which queries; none if every rank has all of them.
    pub queries: Option<Parts>,
    /// Of all queries and this rank's keys; wide.
    pub spec: AttentionSpec,
}

impl PassQ {
    pub fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, Saved<B>) {
        let all = match self.queries.clone() {
            None => q.clone(),
            Some(parts) => {
                let gather = Collective::AllGather { dim: TOKENS, parts };
                let [all] = exchange::<B, Float, _>([(gather, q.clone())], self.comm.as_ref(), site);
                all
            }
        };
        let (out, stats) = B::attention_forward(all, k.clone(), v.clone(), &self.spec);
        let (out, stats) = self.merged::<B>(out, stats, site);
        let out = cast::<B>(out, q.dtype());
        (out.clone(), Saved { q, k, v, out, stats })
    }

    /// Of this rank's queries, what all ranks found; merged in rank order, so that ranks with the same queries get the same
    /// bits.
    fn merged<B: SpBackend>(
        &self,
        out: FloatTensor<B>,
        stats: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let (batch, ranks) = (out.shape()[BATCH], self.comm.size());
        let parts = Parts::contiguous(batch * ranks, ranks);
        // The ranks' results one after another, as if they were samples.
        let collect = |batch_dim: usize, token_dim: usize| match self.queries.clone() {
            None => Collective::AllGather {
                dim: batch_dim,
                parts: parts.clone(),
            },
            Some(queries) => Collective::AllToAll {
                gather_dim: batch_dim,
                gather_parts: parts.clone(),
                scatter_dim: token_dim,
                scatter_parts: queries,
            },
        };
        let packed = [
            (collect(BATCH, TOKENS), out),
            (collect(STATS_BATCH, STATS_TOKENS), stats),
        ];
        let [out, stats] = exchange::<B, Float, _>(packed, self.comm.as_ref(), site);
        let of = |rank: usize| {
            let out = select::<B, Float>(out.clone(), BATCH, parts.of(rank));
            (out, select::<B, Float>(stats.clone(), STATS_BATCH, parts.of(rank)))
        };
        let merge = |(out, stats), (other, other_stats)| B::attention_merge(out, stats, other, other_stats);
        (0..ranks).map(of).reduce(merge).expect("a group has a rank")
    }
}
