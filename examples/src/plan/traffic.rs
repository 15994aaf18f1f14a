//! What a step sends and computes, forecast from the formulas of the literature.

use burn_sp::layout::{AttentionWorkload, MeshShape};

use super::memory::Step;
use crate::flags::{Recompute, Shard};

const ELEMENT: f64 = 4.0;

/// A passes' worth of whatever: forward, backward, and forward again.
struct Passes {
    forward: f64,
    backward: f64,
    again: f64,
}

impl Passes {
    fn sum(&self) -> f64 {
        self.forward + self.backward + self.again
    }
}

impl Step<'_> {
    /// Bytes that a rank sends in a step, the mean over the ranks: attention's exchanges, those of tensor parallelism
    /// (Korthikanti et al., arXiv 2205.05198), and gradients or shared parameters.
    pub fn bytes_sent(&self) -> u64 {
        let run = &self.config.run;
        let layers = self.config.layers as f64;
        let per_layer = self.attention_bytes().sum() + self.tensor_bytes().sum();
        let micro_step = layers * per_layer + self.vocabulary_bytes() + self.gather_bytes();
        (run.accumulate as f64 * micro_step + self.gradient_bytes()) as u64
    }

    /// Forward of attention happens again in backward where it is not kept.
    fn attention_again(&self) -> f64 {
        match self.config.learning.recompute {
            Recompute::Blocks | Recompute::Attention => 1.0,
            Recompute::None | Recompute::AllButAttention => 0.0,
        }
    }

    fn workload(&self) -> AttentionWorkload {
        let run = &self.config.run;
        AttentionWorkload {
            batch: run.batch,
            tokens: run.seq_len,
            heads: self.heads as usize,
            kv_heads: (self.kv as usize / self.model.head_dim).max(1),
            head_dim: self.model.head_dim,
            element_bytes: ELEMENT as usize,
            mask: self.config.mask(),
        }
    }

    fn attention_bytes(&self) -> Passes {
        let run = &self.config.run;
        let mesh = MeshShape::ulysses(run.ulysses).with_ring(run.ring);
        let workload = self.workload();
        // What is gathered sends as much as what travels: keys and values again, and as many gradients.
        let (forward, backward) = (workload.forward_bytes(&mesh), workload.backward_bytes(&mesh));
        let share = 1.0 / run.dp as f64;
        Passes {
            forward: share * forward,
            backward: share * backward,
            again: share * forward * self.attention_again(),
        }
    }

    /// Of all-gathers and reduce-scatters of the tokens of a group, each of which sends this much.
    fn tensor_exchange(&self) -> f64 {
        let tp = self.tp() as f64;
        ELEMENT * self.mean_group() * self.hidden as f64 * (tp - 1.0) / tp
    }

    /// Tokens of a `tp` group, the mean over the groups.
    fn mean_group(&self) -> f64 {
        let run = &self.config.run;
        run.batch as f64 * run.seq_len as f64 / (run.dp * run.ring * run.ulysses) as f64
    }

    fn tensor_bytes(&self) -> Passes {
        // Forward gathers tokens before attention and before the MLP, and scatters sums after each.
        let again = match self.config.learning.recompute {
            Recompute::None => 0.0,
            Recompute::Attention => 1.0,
            Recompute::AllButAttention => 3.0,
            Recompute::Blocks => 4.0,
        };
        // A tiled MLP runs its forward pass once more.
        let tiled = if self.config.learning.mlp_tiles > 1 { 2.0 } else { 0.0 };
        Passes {
            forward: 4.0 * self.tensor_exchange(),
            backward: 6.0 * self.tensor_exchange(),
            again: (again + tiled) * self.tensor_exchange(),
        }
    }

    /// Embedding: its terms are scattered and their gradients gathered. Loss: hidden states gathered, gradients scattered.
    fn vocabulary_bytes(&self) -> f64 {
        4.0 * self.tensor_exchange()
    }

    /// Parameters gathered, again where backward runs a block again, and gradients scattered.
    fn gather_bytes(&self) -> f64 {
        if self.config.learning.shard != Shard::Parameters {
            return 0.0;
        }
        let times = match self.config.learning.recompute {
            Recompute::Blocks => 3.0,
            Recompute::None | Recompute::Attention | Recompute::AllButAttention => 2.0,
        };
        let blocks = self.copies(self.block, self.alike_in_block) * self.config.layers as f64;
        // A tied embedding is gathered for each of its two uses.
        let tied = if self.model.tie_embeddings {
            self.classes * self.hidden
        } else {
            0
        };
        let elsewhere = self.parameters() - self.config.layers as u64 * self.block + tied;
        ELEMENT * (times * blocks + 2.0 * self.copies(elsewhere, self.alike_elsewhere))
    }

    fn gradient_bytes(&self) -> f64 {
        let alike = self.config.layers as u64 * self.alike_in_block + self.alike_elsewhere;
        match self.config.learning.shard {
            Shard::Parameters => 0.0,
            Shard::None | Shard::Optimizer => 2.0 * ELEMENT * self.copies(self.parameters(), alike),
        }
    }

    /// Of so many parameters, what a rank sends to gather them: all but its part, of those that ranks of `tp` hold alike
    /// among more ranks.
    fn copies(&self, parameters: u64, alike: u64) -> f64 {
        let others = |ranks: u64| (ranks - 1) as f64 / ranks as f64;
        let replicas = self.replicas();
        (parameters - alike) as f64 * others(replicas) + alike as f64 * others(replicas * self.tp())
    }

    /// Keys that a token sees, the mean over the tokens.
    fn keys_seen(&self) -> f64 {
        let all = self.config.run.seq_len as f64;
        let window = self.config.window.map_or(all, |window| (window as f64).min(all));
        window - window * (window - 1.0) / (2.0 * all)
    }

    /// FLOP that a rank computes in a step, the mean over the ranks: 2 a parameter and token forward and 4 backward, and
    /// 4 a visible pair and feature of attention forward and 10 backward; forward once more for what is computed again.
    pub fn flop(&self) -> f64 {
        let run = &self.config.run;
        let tokens = (run.batch * run.accumulate) as f64 * run.seq_len as f64 / (run.ranks as f64);
        let tp = self.tp() as f64;
        let mlp = self.mlp as f64 * tp;
        let attention = self.block as f64 * tp - mlp;
        let classes = (self.classes * self.hidden) as f64 * tp;
        let pairs = self.keys_seen();
        let kernel = pairs * (self.query as f64) * tp;
        let again = |of: &[Recompute]| f64::from(u8::from(of.contains(&self.config.learning.recompute)));
        let projected = again(&[Recompute::Blocks, Recompute::Attention]);
        let rest = again(&[Recompute::Blocks, Recompute::AllButAttention]);
        let tiled = f64::from(u8::from(self.config.learning.mlp_tiles > 1));
        let layer = attention * (6.0 + 2.0 * projected)
            + mlp * (6.0 + 2.0 * rest + 2.0 * tiled)
            + kernel * (14.0 + 4.0 * projected);
        tokens * (self.config.layers as f64 * layer + 6.0 * classes)
    }
}
