//! A block of the default model: what its passes allocate, in their order.

use burn_sp_models::transformer::PositionKind;

use super::memory::Step;
use super::walk::{Held, Kind::*, Walk};
use crate::flags::Kv;

/// What attention keeps for backward, beside the block's input.
pub(super) struct SavedHeads {
    normed: Held,
    /// Queries, keys, values, output and statistics, as attention computed with them.
    attention: Vec<Held>,
}

/// What the rest of a block keeps for backward, beside its inputs.
pub(super) struct SavedRest {
    stream: Held,
    normed: Held,
    /// The MLP's two products, and what is made of them; none if it is computed again.
    units: Vec<Held>,
}

impl Step<'_> {
    /// A product of this many elements. Burn's own on Flex hold the result twice for a moment, ours (under `tp`) do not.
    fn product(&self, walk: &mut Walk, elements: u64) -> Held {
        let held = walk.alloc(Activations, elements);
        if self.tp() == 1 {
            walk.touch(Activations, elements);
        }
        held
    }

    /// Tokens of the group, gathered.
    fn gathered(&self, walk: &mut Walk, tokens: u64) -> Option<Held> {
        (self.tp() > 1).then(|| walk.alloc(Buffers, tokens * self.hidden))
    }

    /// A row-parallel product: a term for all tokens of the group, of which each rank gets the sum of its own.
    fn row_product(&self, walk: &mut Walk, tokens: u64) -> Held {
        let own = tokens * self.hidden / self.tp();
        if self.tp() == 1 {
            return self.product(walk, own);
        }
        let term = walk.alloc(Activations, tokens * self.hidden);
        let sum = walk.alloc(Activations, own);
        walk.free(term);
        sum
    }

    /// Norm, projections and attention: the heads, and what is kept.
    pub fn heads_forward(&self, walk: &mut Walk) -> (Held, SavedHeads) {
        let group = self.group;
        let normed = walk.alloc(Activations, self.own * self.hidden);
        let whole = self.gathered(walk, group);
        let rotary = matches!(self.model.positions, PositionKind::Rotary { .. });
        let project = |walk: &mut Walk, features: u64, turned: bool| {
            let y = self.product(walk, group * features);
            if !turned {
                return y;
            }
            let turned = walk.alloc(Activations, group * features);
            walk.free(y);
            turned
        };
        let mut attention = vec![
            project(walk, self.query, rotary),
            project(walk, self.kv, rotary),
            project(walk, self.kv, false),
        ];
        walk.free_all(whole);
        let run = &self.config.run;
        if run.ulysses > 1 {
            let exchanged = walk.alloc(Activations, group * (self.query + 2 * self.kv));
            walk.free_all(attention);
            attention = vec![exchanged];
        }
        let out = walk.alloc(Activations, group * self.query);
        attention.push(walk.alloc(Activations, 2 * group * self.heads));
        self.travel(walk, |walk| {
            walk.touch(Activations, group * (self.query + 2 * self.heads))
        });
        let out = match run.ulysses {
            1 => out,
            _ => {
                attention.push(out);
                walk.alloc(Activations, group * self.query)
            }
        };
        (out, SavedHeads { normed, attention })
    }

    /// Keys and values of other ranks are here while `inside` runs.
    fn travel(&self, walk: &mut Walk, inside: impl FnOnce(&mut Walk)) {
        let run = &self.config.run;
        let block = 2 * self.group * self.kv;
        let (buffers, merges) = match (run.ring, run.kv) {
            (1, _) => return,
            // The block that is computed with, and the one that comes.
            (2, Kv::Ring) => (block, true),
            (_, Kv::Ring) => (2 * block, true),
            (ranks, Kv::Gather) => (ranks as u64 * block, false),
        };
        let buffers = walk.alloc(Buffers, buffers);
        if merges {
            inside(walk);
        }
        walk.free(buffers);
    }

    /// The output projection and the MLP: the block's output, and what is kept. The heads are the caller's to free.
    pub fn rest_forward(&self, walk: &mut Walk) -> (Held, SavedRest) {
        let own = self.own * self.hidden;
        let branch = self.row_product(walk, self.group);
        let stream = walk.alloc(Activations, own);
        let normed = walk.alloc(Activations, own);
        walk.free(branch);
        let (branch, units) = match self.config.learning.mlp_tiles as u64 {
            1 => self.mlp_forward(walk, self.group),
            tiles => {
                let branch = walk.alloc(Activations, own);
                let (tile, units) = self.mlp_forward(walk, self.group.div_ceil(tiles));
                walk.free_all(units);
                walk.free(tile);
                (branch, Vec::new())
            }
        };
        if self.model.dropout > 0.0 {
            walk.touch(Activations, own);
        }
        (branch, SavedRest { stream, normed, units })
    }

    fn mlp_forward(&self, walk: &mut Walk, tokens: u64) -> (Held, Vec<Held>) {
        let whole = self.gathered(walk, tokens);
        let mut units: Vec<Held> = (0..self.ups).map(|_| self.product(walk, tokens * self.ffn)).collect();
        let hidden = walk.alloc(Activations, tokens * self.ffn);
        if self.ups == 1 {
            // The activation is made of several operations, two of which keep what they read.
            walk.touch(Activations, tokens * self.ffn);
        }
        units.push(hidden);
        walk.free_all(whole);
        (self.row_product(walk, tokens), units)
    }

    /// Backward to the heads' gradient, from that of the block's output (which stays: it is the stream's too). Gradients
    /// of parameters of `kind` come to be. The heads are freed.
    pub fn rest_backward(&self, walk: &mut Walk, saved: SavedRest, heads: Held, grads: &mut Grads) -> Held {
        let own = self.own * self.hidden;
        let dropped = (self.model.dropout > 0.0).then(|| walk.alloc(Activations, own));
        let dnormed = match self.config.learning.mlp_tiles as u64 {
            1 => self.mlp_backward(walk, saved.units, self.group, grads),
            tiles => {
                let dnormed = walk.alloc(Activations, own);
                let tokens = self.group.div_ceil(tiles);
                // The last tile, whose parameters' gradients are added to those of the others.
                grads.add(walk, self.mlp);
                let mut last = Grads::default();
                let (out, units) = self.mlp_forward(walk, tokens);
                let seed = walk.alloc(Activations, tokens * self.hidden / self.tp());
                walk.free(out);
                let tile = self.mlp_backward(walk, units, tokens, &mut last);
                walk.free_all(last.0);
                walk.free_all([tile, seed]);
                dnormed
            }
        };
        walk.free_all(dropped);
        // Through the norm, and added to the stream's.
        let dstream = walk.alloc(Activations, own);
        walk.free_all([dnormed, saved.normed, saved.stream]);
        // Through the projection, whose input the heads are.
        let sum = self.gathered(walk, self.group);
        let dheads = self.product(walk, self.group * self.query);
        grads.add(walk, self.hidden * self.query);
        walk.free_all(sum);
        walk.free_all([heads, dstream]);
        dheads
    }

    fn mlp_backward(&self, walk: &mut Walk, mut units: Vec<Held>, tokens: u64, grads: &mut Grads) -> Held {
        let own = tokens * self.hidden / self.tp();
        let sum = self.gathered(walk, tokens);
        let dhidden = self.product(walk, tokens * self.ffn);
        grads.add(walk, self.hidden * self.ffn);
        walk.free_all(sum);
        walk.free_all(units.pop());
        // The first takes the place of what it is made from.
        let mut dunits = vec![dhidden];
        dunits.extend((1..self.ups).map(|_| walk.alloc(Activations, tokens * self.ffn)));
        walk.free_all(units);
        let whole = self.gathered(walk, tokens);
        if self.tp() == 1 {
            let mut dx: Vec<Held> = Vec::new();
            for dunit in dunits {
                dx.push(self.product(walk, own));
                grads.add(walk, self.hidden * self.ffn);
                walk.free(dunit);
            }
            let last = dx.pop().expect("there is a product");
            walk.free_all(dx);
            return last;
        }
        (0..self.ups).for_each(|_| grads.add(walk, self.hidden * self.ffn));
        walk.free_all(whole);
        let all = walk.alloc(Activations, tokens * self.hidden);
        walk.free_all(dunits);
        let dx = walk.alloc(Activations, own);
        walk.free(all);
        dx
    }

    /// Backward from the heads' gradient to the block's input, whose gradient takes the place of its output's.
    pub fn heads_backward(&self, walk: &mut Walk, saved: SavedHeads, dheads: Held, grads: &mut Grads) {
        let (group, own) = (self.group, self.own * self.hidden);
        let run = &self.config.run;
        let exchanged = (run.ulysses > 1).then(|| walk.alloc(Activations, group * self.query));
        let dheads = match exchanged {
            Some(exchanged) => {
                walk.free(dheads);
                exchanged
            }
            None => dheads,
        };
        // On Flex keys and values get their gradients by query head first.
        let features = 3 * self.query;
        let mut dqkv = walk.alloc(Activations, group * features);
        self.travel(walk, |walk| walk.touch(Buffers, group * (features + 4 * self.kv)));
        if run.ulysses > 1 {
            let home = walk.alloc(Activations, group * (self.query + 2 * self.kv));
            walk.free(dqkv);
            dqkv = home;
        }
        walk.free_all(saved.attention);
        walk.free(dheads);
        walk.touch(Activations, group * self.query);
        let whole = self.gathered(walk, group);
        let dx = match self.tp() {
            1 => walk.alloc(Activations, 3 * own),
            _ => walk.alloc(Activations, group * self.hidden + own),
        };
        grads.add(walk, self.hidden * (self.query + 2 * self.kv));
        walk.free_all(whole);
        walk.free_all([dqkv, saved.normed]);
        walk.touch(Activations, own);
        walk.free(dx);
    }
}

impl Step<'_> {
    /// Frees what attention would have kept, had it not been run to be run again.
    pub fn drop_heads(&self, walk: &mut Walk, saved: SavedHeads) {
        walk.free(saved.normed);
        walk.free_all(saved.attention);
    }

    /// The same of the rest.
    pub fn drop_rest(&self, walk: &mut Walk, saved: SavedRest) {
        walk.free_all([saved.stream, saved.normed]);
        walk.free_all(saved.units);
    }
}

/// Gradients of parameters, as they come to be.
#[derive(Default)]
pub(super) struct Grads(pub Vec<Held>);

impl Grads {
    fn add(&mut self, walk: &mut Walk, elements: u64) {
        self.0.push(walk.alloc(Gradients, elements));
    }
}
