//! Keys that are of other tokens than the queries, and sharded in another way.

use burn::nn::Linear;
use burn::tensor::{Tensor, TensorData};
use burn_sp::attention::{AttentionOptions, KvMove, Mask, attention};
use burn_sp::comm::Parts;
use burn_sp::layout::{Axis, Layout, Placement, Split};
use burn_sp::train::LossShare;
use burn_sp_tests::{Comparison, Outcome};

use crate::common::{mesh, noise};

/// 5 queries and 7 keys over the ring, of which the first rank has the last ones; heads over ulysses. Gradients too.
#[test]
fn keys_of_other_tokens_travel() {
    let input = |seed, tokens: usize| TensorData::new(noise(seed, 2 * tokens * 3 * 4), [2, tokens, 3, 4]);
    let empty: Vec<Linear> = Vec::new();
    for kv in [KvMove::Ring, KvMove::Gather] {
        let comparison = Comparison::new(empty.clone())
            .with_factor(4.0)
            .input("q", input(1, 5))
            .input("k", input(2, 7))
            .input("v", input(3, 7))
            .on([
                mesh(1, 2, 1),
                mesh(1, 3, 1),
                mesh(1, 1, 2),
                mesh(1, 1, 4),
                mesh(1, 2, 2),
                mesh(2, 2, 1),
            ]);
        let outcome = comparison.run(|rank, _| {
            let device = rank.device();
            let ranks = device.mesh().size(Axis::Ring);
            let descending = |rank: usize| {
                let own = Parts::contiguous(7, ranks);
                own.of(ranks - 1 - rank).to_vec()
            };
            let keys = match ranks {
                1 => Split::Contiguous,
                _ => Split::Explicit(Parts::new((0..ranks).map(descending).collect())),
            };
            let lay = |whole: Tensor<4>, split: Split| {
                let layout = Layout::replicated(whole.dims())
                    .shard(0, Axis::Dp, Split::Contiguous)
                    .shard(1, Axis::Ring, split);
                let laid = device.distribute(whole, &layout);
                laid.redistribute(Axis::Ulysses, Placement::Shard(2))
            };
            let q = lay(rank.input("q"), Split::Zigzag);
            let [k, v] = ["k", "v"].map(|name| lay(rank.input(name), keys.clone()));
            let options = AttentionOptions {
                mask: Mask::Full,
                kv,
                ..AttentionOptions::default()
            };
            let out = attention(q, k, v, &options);
            Outcome::new(LossShare::mean(out.clone().mul(out.clone()))).output("out", &out)
        });
        if let Err(difference) = outcome {
            panic!("{kv:?}: {difference}");
        }
    }
}
