//! The memory of a training step, forecast: the allocations of the default model's step, walked through in the order in
//! which they happen, with sizes instead of tensors.

use burn_sp_models::transformer::{MlpKind, NormKind, PositionKind, TransformerConfig};

use super::block::{Grads, SavedHeads, SavedRest};
use super::walk::{Bytes, Held, Kind::*, Walk};
use crate::config::TrainConfig;
use crate::flags::{Recompute, Shard};

/// The training step of the rank that has most, in elements.
pub(super) struct Step<'a> {
    pub config: &'a TrainConfig,
    pub model: TransformerConfig,
    /// Tokens, over its sequences.
    pub own: u64,
    /// Those of all ranks of `tp`, which they compute with between them.
    pub group: u64,
    pub hidden: u64,
    /// Features of its query heads, of its key/value heads, and hidden units of its MLP.
    pub query: u64,
    pub kv: u64,
    pub ffn: u64,
    /// Its query heads.
    pub heads: u64,
    /// Products before the MLP's activation.
    pub ups: u64,
    /// Its classes.
    pub classes: u64,
    /// Its parameters when they are whole: of the embeddings, a block, in it the MLP, and what comes after the blocks.
    embedding: u64,
    pub block: u64,
    pub mlp: u64,
    head: u64,
    /// Of these, what ranks of `tp` hold alike: in a block, and elsewhere.
    pub alike_in_block: u64,
    pub alike_elsewhere: u64,
}

/// A share of `count`, of the rank that has most.
fn share(count: usize, ranks: usize) -> u64 {
    count.div_ceil(ranks) as u64
}

impl<'a> Step<'a> {
    pub fn new(config: &'a TrainConfig) -> Self {
        let (run, model) = (&config.run, config.model());
        let sequences = share(run.batch, run.dp);
        let group = share(run.seq_len, run.ring * run.ulysses);
        let own = sequences * share(group as usize, run.tp);
        let tp = run.tp;
        let heads = share(model.heads, tp);
        // Key/value heads that do not divide as the query heads do stay whole.
        let kv_heads = match model.kv_heads % tp {
            0 => share(model.kv_heads, tp),
            _ => model.kv_heads as u64,
        };
        let (hidden, head_dim) = (model.hidden_size as u64, model.head_dim as u64);
        let (query, kv, ffn) = (heads * head_dim, kv_heads * head_dim, share(model.ffn_size, tp));
        let classes = share(model.vocab_size, tp);
        let norm = match model.norm {
            NormKind::Rms => hidden,
            NormKind::Layer => 2 * hidden,
        };
        let ups = match model.mlp {
            MlpKind::SwiGlu => 2,
            MlpKind::Gelu => 1,
        };
        let bias = |outputs: u64| if model.bias { outputs } else { 0 };
        let attention = hidden * (query + 2 * kv) + bias(query + 2 * kv) + query * hidden + bias(hidden);
        let mlp = ups * (hidden * ffn + bias(ffn)) + ffn * hidden + bias(hidden);
        let positions = match model.positions {
            PositionKind::Learned { max } => max as u64 * hidden,
            PositionKind::Rotary { .. } => 0,
        };
        let head = if model.tie_embeddings { 0 } else { classes * hidden };
        Self {
            config,
            own,
            group: sequences * group,
            hidden,
            query,
            kv,
            ffn,
            heads,
            ups,
            classes,
            mlp,
            alike_in_block: 2 * (norm + bias(hidden))
                + if kv_heads * tp as u64 > model.kv_heads as u64 {
                    2 * (hidden * kv + bias(kv))
                } else {
                    0
                },
            alike_elsewhere: positions + norm,
            embedding: classes * hidden + positions,
            block: 2 * norm + attention + mlp,
            head: head + norm,
            model,
        }
    }

    pub fn tp(&self) -> u64 {
        self.config.run.tp as u64
    }

    /// Parameters, whole.
    pub fn parameters(&self) -> u64 {
        self.embedding + self.config.layers as u64 * self.block + self.head
    }

    /// The ranks that hold the same parameters.
    pub fn replicas(&self) -> u64 {
        let run = &self.config.run;
        (run.dp * run.ring * run.ulysses) as u64
    }

    /// A rank's part of parameters that may be shared out.
    fn part(&self, elements: u64) -> u64 {
        match self.config.learning.shard {
            Shard::Parameters => elements.div_ceil(self.replicas()),
            Shard::None | Shard::Optimizer => elements,
        }
    }

    /// The most that is held at once, from the second step on, when the optimizer has its moments.
    pub fn forecast(&self) -> Bytes {
        let mut walk = Walk::default();
        let walk = &mut walk;
        let held = self.part(self.parameters());
        let state = match self.config.learning.shard {
            Shard::Optimizer => held.div_ceil(self.replicas()),
            Shard::None | Shard::Parameters => held,
        };
        let _parameters = walk.alloc(Parameters, held);
        let _optimizer = walk.alloc(Optimizer, 2 * state);
        let micro_steps = self.config.run.accumulate;
        let mut sum: Option<Held> = None;
        for _ in 0..micro_steps.min(2) {
            let grads = self.forward_backward(walk);
            // From here on one by one, and all there.
            walk.free_all(grads);
            let all = walk.alloc(Gradients, held);
            walk.free_all(sum.replace(all));
        }
        let sum = sum.expect("there is a step");
        if self.replicas() > 1 && self.config.learning.shard != Shard::Parameters {
            // Joined, and the sum of all ranks.
            walk.touch(Buffers, 2 * held.min(BUCKET));
        }
        // An update makes some of the largest parameter anew.
        let largest = self.part((self.hidden * self.ffn).max(self.classes * self.hidden));
        walk.touch(Optimizer, 5 * largest);
        walk.free(sum);
        walk.most()
    }

    fn forward_backward(&self, walk: &mut Walk) -> Vec<Held> {
        let own = self.own * self.hidden;
        let layers = self.config.layers;
        let gathers = self.config.learning.shard == Shard::Parameters && self.replicas() > 1;
        let mut grads = Grads::default();
        let mut whole_weights = Vec::new();
        if gathers {
            // Burn's embedding keeps its weights for backward.
            whole_weights.push(walk.alloc(Buffers, self.embedding));
        }
        // Rotary tables, token ids and labels.
        let head_dim = self.model.head_dim as u64;
        let fixed = walk.alloc(Activations, self.group * head_dim + 8 * self.own);
        let mut streams = vec![walk.alloc(Activations, own)];
        let mut saved: Vec<(Option<SavedHeads>, Option<Held>, Option<SavedRest>)> = Vec::new();
        for _ in 0..layers {
            let recompute = self.config.learning.recompute;
            if gathers && recompute != Recompute::Blocks {
                whole_weights.push(walk.alloc(Buffers, self.block));
            }
            if recompute == Recompute::Blocks {
                // What it takes to run it is no more than what it takes to run it again.
                streams.push(walk.alloc(Activations, own));
                saved.push((None, None, None));
                continue;
            }
            let (heads, kept) = self.heads_forward(walk);
            let kept = match recompute {
                Recompute::Attention => {
                    self.drop_heads(walk, kept);
                    None
                }
                _ => Some(kept),
            };
            let (out, rest) = self.rest_forward(walk);
            let rest = match recompute {
                Recompute::AllButAttention => {
                    self.drop_rest(walk, rest);
                    None
                }
                _ => Some(rest),
            };
            streams.push(out);
            saved.push((kept, Some(heads), rest));
        }
        let gradient = self.loss(walk, &mut grads);
        for (kept, heads, rest) in saved.into_iter().rev() {
            walk.free_all(streams.pop());
            let weights = (gathers && self.config.learning.recompute == Recompute::Blocks)
                .then(|| walk.alloc(Buffers, self.block));
            let mut own_grads = Grads::default();
            let (heads, mut kept) = match heads {
                Some(heads) => (heads, kept),
                None => {
                    let (heads, kept) = self.heads_forward(walk);
                    (heads, Some(kept))
                }
            };
            let (rest, again) = match rest {
                Some(rest) => (rest, None),
                None => {
                    let (out, rest) = self.rest_forward(walk);
                    // The product that starts its backward.
                    (rest, Some((out, walk.alloc(Activations, own))))
                }
            };
            let seed = again.map(|(out, product)| {
                walk.free_all([out, product]);
                walk.alloc(Activations, own)
            });
            let dheads = self.rest_backward(walk, rest, heads, &mut own_grads);
            let kept = kept.take().unwrap_or_else(|| {
                let (heads, kept) = self.heads_forward(walk);
                walk.free(heads);
                kept
            });
            self.heads_backward(walk, kept, dheads, &mut own_grads);
            walk.free_all(seed);
            if gathers && self.config.learning.recompute == Recompute::Blocks {
                walk.free_all(own_grads.0);
                walk.free_all(weights);
                grads.0.push(walk.alloc(Gradients, self.part(self.block)));
            } else {
                grads.0.extend(own_grads.0);
            }
        }
        walk.free_all(streams);
        walk.free_all([fixed, gradient]);
        walk.free_all(whole_weights);
        grads.0.push(walk.alloc(Gradients, self.part(self.embedding)));
        grads.0
    }

    /// The last norm and the loss, forward and backward: the gradient of the stream.
    fn loss(&self, walk: &mut Walk, grads: &mut Grads) -> Held {
        let own = self.own * self.hidden;
        let normed = walk.alloc(Activations, own);
        let (dx, dweight) = (
            walk.alloc(Activations, own),
            walk.alloc(Gradients, self.classes * self.hidden),
        );
        let classes = self.classes.max(1);
        let chunk = ((1 << 20) / classes).clamp(256, 1024).min(self.group);
        walk.touch(Logits, chunk * (3 * classes + self.hidden));
        // Scaled.
        let scaled = walk.alloc(Activations, own);
        walk.free_all([normed, dx]);
        grads.0.push(walk.alloc(Gradients, self.part(self.head)));
        walk.free(dweight);
        let gradient = walk.alloc(Activations, own);
        walk.free(scaled);
        gradient
    }
}

/// Elements that a message of gradients holds.
const BUCKET: u64 = 1 << 24;
