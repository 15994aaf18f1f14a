//! Keys and values travel around a ring (Ring Attention, arXiv 2310.01889): in each of P - 1 hops they go to the next
//! rank while attention to the present ones is computed, and partial outputs are merged by their softmax statistics.
//! Backward sends them around again; the gradients of a block start at the first rank that it visits, travel with it and
//! are added on the way, in the accumulation dtype. Queries stay where they are, so any head count works.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Float;
use burn_sp_comm::{Collective, Communicator, Site};
use kernels_cubecl::{AttentionSpec, Positions};

use super::strategy::{Gradients3, Saved, cast};
use crate::tensor::{SpBackend, Underway, zeros};

#[derive(Clone, Debug)]
pub(crate) struct Ring {
    pub comm: Arc<dyn Communicator>,
    /// The positions of each rank's keys.
    pub owners: Vec<Positions>,
    /// The keys' positions are this rank's own.
    pub spec: AttentionSpec,
}

impl Ring {
    pub fn forward<B: SpBackend>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        site: Site,
    ) -> (FloatTensor<B>, Saved<B>) {
        let mut block = [k.clone(), v.clone()];
        let mut merged = None;
        for hop in 0..self.comm.size() {
            let next = self.next_block::<B>(hop, &block, site);
            if let Some(spec) = self.visible(hop) {
                let [k, v] = block;
                let (out, stats) = B::attention_forward(q.clone(), k, v, &spec);
                merged = Some(match merged {
                    None => (out, stats),
                    Some((before, before_stats)) => B::attention_merge(before, before_stats, out, stats),
                });
            }
            let Some(next) = next else { break };
            block = next.wait();
        }
        let (out, stats) = merged.expect("the first hop is always computed");
        let out = cast::<B>(out, q.dtype());
        (out.clone(), Saved { q, k, v, out, stats })
    }

    pub fn backward<B: SpBackend>(&self, saved: Saved<B>, grad: FloatTensor<B>, site: Site) -> Gradients3<B> {
        let Saved { q, k, v, out, stats } = saved;
        let accumulation = stats.dtype();
        let mut block = [k, v];
        let (mut sum_dq, mut home, mut travelling) = (None, None, None);
        for hop in 0..self.comm.size() {
            let next = self.next_block::<B>(hop, &block, site);
            let shapes = [block[0].shape(), block[1].shape()];
            let mut own = None;
            if let Some(spec) = self.visible(hop) {
                let [k, v] = block;
                let (dq, dk, dv) =
                    B::attention_backward(q.clone(), k, v, out.clone(), stats.clone(), grad.clone(), &spec);
                sum_dq = Some(add::<B>(sum_dq, dq));
                own = Some([dk, dv]);
            }
            if hop == 0 {
                home = own;
            } else {
                // What the ranks behind have added to the gradients of this block, and this rank's term.
                let before = travelling
                    .take()
                    .map(|gradients: Underway<B, Float, 2>| gradients.wait());
                let gradients = match (before, own) {
                    (Some([dk, dv]), Some([own_dk, own_dv])) => [B::float_add(dk, own_dk), B::float_add(dv, own_dv)],
                    (Some(gradients), None) | (None, Some(gradients)) => gradients,
                    (None, None) => shapes.map(|shape| zeros::<B>(shape, &q.device(), accumulation)),
                };
                travelling = Some(self.pass::<B>(gradients, site));
            }
            let Some(next) = next else { break };
            block = next.wait();
        }
        let [dk, dv] = home.expect("the first hop is always computed");
        let [dk, dv] = match travelling.map(Underway::wait) {
            Some([others_dk, others_dv]) => [B::float_add(dk, others_dk), B::float_add(dv, others_dv)],
            None => [dk, dv],
        };
        let dq = sum_dq.expect("the first hop is always computed");
        (dq, dk, dv)
    }

    /// Attention to the block that is here in this hop, unless none of its keys is seen. The rank's own block, in the
    /// first hop, is always computed: rows that see nothing get their zeros from it.
    fn visible(&self, hop: usize) -> Option<AttentionSpec> {
        let size = self.comm.size();
        let keys = &self.owners[(self.comm.rank() + size - hop) % size];
        let seen = hop == 0 || self.spec.mask.sees_any(&self.spec.q_positions, keys);
        seen.then(|| AttentionSpec {
            k_positions: keys.clone(),
            // Parts are merged, and gradients added, before they are rounded.
            wide: true,
            ..self.spec.clone()
        })
    }

    /// Sends the block on, unless it has been everywhere; it leaves before this rank computes with it.
    fn next_block<B: SpBackend>(
        &self,
        hop: usize,
        block: &[FloatTensor<B>; 2],
        site: Site,
    ) -> Option<Underway<B, Float, 2>> {
        (hop + 1 < self.comm.size()).then(|| self.pass::<B>(block.clone(), site))
    }

    /// To the next rank, in one message.
    fn pass<B: SpBackend>(&self, tensors: [FloatTensor<B>; 2], site: Site) -> Underway<B, Float, 2> {
        let transfers = tensors.map(|tensor| (Collective::Shift { by: 1 }, tensor));
        Underway::start(transfers, self.comm.as_ref(), site)
    }
}

fn add<B: SpBackend>(sum: Option<FloatTensor<B>>, term: FloatTensor<B>) -> FloatTensor<B> {
    match sum {
        Some(sum) => B::float_add(sum, term),
        None => term,
    }
}
