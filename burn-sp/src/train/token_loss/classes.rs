use std::ops::Range;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Float, Slice};
use burn_sp_comm::{Collective, Communicator, Parts, Site, Transfer, raise};

use super::compute::Tokens;
use crate::tensor::{SpBackend, exchange, select};

/// The ranks that hold the classes of one output layer between them, and tokens of one slice.
///
/// Each chunk of tokens goes to all of them. They exchange the statistics of their logits and send each token's gradient
/// home, so that no rank ever holds all tokens or all classes of one.
#[derive(Clone, Debug)]
pub(super) struct ClassGroup {
    comm: Arc<dyn Communicator>,
    /// How many tokens each rank has.
    rows: Vec<usize>,
    site: Site,
}

impl ClassGroup {
    pub fn new(comm: Arc<dyn Communicator>, rows: Vec<usize>, site: Site) -> Self {
        Self { comm, rows, site }
    }

    pub fn size(&self) -> usize {
        self.rows.len()
    }

    /// The most tokens that a rank has.
    pub fn longest(&self) -> usize {
        self.rows.iter().copied().max().unwrap_or(0)
    }

    /// Who brings what to the chunk of these local tokens of every rank: one rank's after the other's.
    fn parts(&self, chunk: &Range<usize>) -> Parts {
        let mut next = 0;
        let part = |rows: &usize| {
            let start = next;
            next += chunk.end.min(*rows) - chunk.start.min(*rows);
            vec![start..next]
        };
        Parts::new(self.rows.iter().map(part).collect())
    }

    /// The chunk's tokens of all ranks, in one message.
    pub fn gather<B: SpBackend>(&self, own: Tokens<B>, chunk: Range<usize>) -> Tokens<B> {
        let (device, parts) = (own.hidden.device(), self.parts(&chunk));
        let transfer = |buffer| Transfer {
            op: Collective::AllGather {
                dim: 0,
                parts: parts.clone(),
            },
            buffer,
        };
        let transfers = vec![
            transfer(B::float_into_buffer(own.hidden)),
            transfer(B::float_into_buffer(own.weights)),
            transfer(B::int_into_buffer(own.targets)),
        ];
        let all = self.comm.run(transfers, self.site).unwrap_or_else(|error| raise(error));
        let [hidden, weights, targets] = all
            .try_into()
            .unwrap_or_else(|_| unreachable!("an exchange of 3 tensors returns 3"));
        Tokens {
            hidden: B::float_from_buffer(hidden, &device),
            weights: B::float_from_buffer(weights, &device),
            targets: B::int_from_buffer(targets, &device),
        }
    }

    /// The statistics over all classes from those of each rank's, `[3, rows]`: added in rank order, so that every rank
    /// has the same bits.
    pub fn merge<B: SpBackend>(&self, own: FloatTensor<B>) -> FloatTensor<B> {
        let (ranks, rows) = (self.size(), own.shape()[1]);
        let parts = Parts::contiguous(3 * ranks, ranks);
        let gather = [(Collective::AllGather { dim: 0, parts }, own)];
        let [all] = exchange::<B, Float, _>(gather, self.comm.as_ref(), self.site);
        let all = B::float_reshape(all, [ranks, 3, rows].into());
        let part = |index: usize| {
            let slices = [0..ranks, index..index + 1, 0..rows].map(Slice::from);
            B::float_reshape(B::float_slice(all.clone(), &slices), [ranks, rows].into())
        };
        let peaks = part(0);
        let peak = B::float_max_dim(peaks.clone(), 0);
        let factors = B::float_exp(B::float_sub(peaks, peak.clone()));
        let sum = B::float_sum_dim(B::float_mul(part(1), factors), 0);
        let of_target = B::float_sum_dim(part(2), 0);
        B::float_cat(vec![peak, sum, of_target], 0)
    }

    /// This rank's rows of what there is of each of the chunk's tokens.
    pub fn own<B: SpBackend>(&self, all: FloatTensor<B>, chunk: Range<usize>) -> FloatTensor<B> {
        select::<B, Float>(all, 0, self.parts(&chunk).of(self.comm.rank()))
    }

    /// Every rank's terms of the gradient of the chunk's tokens -> the sum for this rank's tokens.
    pub fn scatter<B: SpBackend>(&self, terms: FloatTensor<B>, chunk: Range<usize>) -> FloatTensor<B> {
        let parts = self.parts(&chunk);
        let scatter = [(Collective::ReduceScatter { dim: 0, parts }, terms)];
        let [own] = exchange::<B, Float, _>(scatter, self.comm.as_ref(), self.site);
        own
    }
}
