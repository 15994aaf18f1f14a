//! Counting what is held while a step goes through its allocations.

use serde::{Deserialize, Serialize};

/// What memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Parameters,
    Gradients,
    Optimizer,
    /// Of the layers: what forward keeps for backward, and what both compute in passing.
    Activations,
    /// Of the output layer's classes, and what the loss computes with them.
    Logits,
    /// What travels between ranks, or is joined to travel.
    Buffers,
}

/// Bytes of a rank, by what they are held for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// The parameters, or the rank's share of them.
    pub parameters: u64,
    /// Their gradients.
    pub gradients: u64,
    /// The optimizer's two moments.
    pub optimizer: u64,
    /// Of the layers: what forward keeps for backward, and what both compute in passing.
    pub activations: u64,
    /// Of the output layer's classes, and what the loss computes with them.
    pub logits: u64,
    /// What travels between ranks, or is joined to travel, and gathered parameters.
    pub buffers: u64,
}

impl Bytes {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers
    }

    fn of(&mut self, kind: Kind) -> &mut u64 {
        match kind {
            Kind::Parameters => &mut self.parameters,
            Kind::Gradients => &mut self.gradients,
            Kind::Optimizer => &mut self.optimizer,
            Kind::Activations => &mut self.activations,
            Kind::Logits => &mut self.logits,
            Kind::Buffers => &mut self.buffers,
        }
    }
}

/// Some elements that were allocated; given back to [`Walk::free`].
#[derive(Debug)]
#[must_use]
pub(super) struct Held(Kind, u64);

/// What is held now, and what was when it was most.
#[derive(Debug, Default)]
pub(super) struct Walk {
    now: Bytes,
    most: Bytes,
}

/// Elements are f32.
const ELEMENT: u64 = 4;

impl Walk {
    pub fn alloc(&mut self, kind: Kind, elements: u64) -> Held {
        *self.now.of(kind) += ELEMENT * elements;
        if self.now.total() > self.most.total() {
            self.most = self.now;
        }
        Held(kind, elements)
    }

    /// Held for a moment.
    pub fn touch(&mut self, kind: Kind, elements: u64) {
        let held = self.alloc(kind, elements);
        self.free(held);
    }

    pub fn free(&mut self, Held(kind, elements): Held) {
        *self.now.of(kind) -= ELEMENT * elements;
    }

    pub fn free_all(&mut self, held: impl IntoIterator<Item = Held>) {
        held.into_iter().for_each(|held| self.free(held));
    }

    /// The most that was held at once.
    pub fn most(&self) -> Bytes {
        self.most
    }
}
