//! The mesh that a user gets who names only the number of ranks.

use burn_sp_comm::Parts;
use kernels_cubecl::{Mask, Positions};

use super::MeshShape;

#[cfg(test)]
mod tests;

/// One attention layer, as far as the choice of a mesh depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionWorkload {
    /// Sequences of a step, which the ranks share.
    pub batch: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; a divisor of the query heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Bytes of an element: 4 for f32, 2 for bf16.
    pub element_bytes: usize,
    /// Who sees whom.
    pub mask: Mask,
}

/// How fast ranks compute and reach each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// FLOP/s of a rank in attention.
    pub flops_per_second: f64,
    /// What a rank sends to ranks of its node, in bytes a second.
    pub bytes_per_second_in_node: f64,
    /// What a rank sends to ranks of other nodes, in bytes a second.
    pub bytes_per_second_between_nodes: f64,
    /// Ranks of a node, which are consecutive.
    pub ranks_per_node: usize,
    /// Whether data travel while a rank computes, so that the hops of a ring can hide behind its blocks.
    pub overlap: bool,
}

impl Links {
    /// Ranks that are threads of one process: about 40 GFLOP/s and 4 GB/s a core, what today's CPUs reach in attention
    /// and in copies. The core that computes is the one that copies, so nothing hides.
    pub fn threads() -> Self {
        Self {
            flops_per_second: 40e9,
            bytes_per_second_in_node: 4e9,
            bytes_per_second_between_nodes: 4e9,
            ranks_per_node: usize::MAX,
            overlap: false,
        }
    }
}

/// A mesh, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshChoice {
    /// The mesh.
    pub mesh: MeshShape,
    /// One line for a person.
    pub reason: String,
}

impl MeshShape {
    /// The mesh of the two sequence axes, `ring x ulysses = ranks`, on which a training step waits least; none if there
    /// are more ranks than tokens. Where meshes are alike, the one with more ulysses.
    ///
    /// What counts for a layer, forward and backward, with `s` tokens, batch `b`, `h = heads * head_dim`,
    /// `g = kv_heads / heads`, `P = ranks = u r` for `u` ranks of ulysses inside `r` of ring:
    ///
    /// - **Elements sent**, a rank and forward: ulysses `(2 + 2g) b (s h / P) (u - 1) / u` (arXiv 2309.14509),
    ///   ring `2g b (s h / u) (r - 1) / r` (arXiv 2310.01889). Where `u` does not divide the key/value heads, `g` counts
    ///   a head once for every rank that reads it. Backward, ulysses sends as many, and the ring sends keys and values
    ///   again with as many gradients of them. Gradients to which several ranks add (those of the ring, and of key/value
    ///   heads that ranks of ulysses share) travel in f32 at least.
    /// - **What hides.** An exchange or a hop is as slow as its slowest link. Where transfers overlap, a ring waits only
    ///   for what its hops take longer than the blocks they travel behind, `(r - 1) / r` of the time of attention.
    ///   Exchanges never hide. That a ring computes in smaller blocks is not counted.
    /// - **Idle ranks.** `u` ranks take `ceil(heads / u) u / heads` times as long as if heads were split evenly. Attention
    ///   takes `14 b h (visible pairs) / (P FLOP/s)` seconds: two products forward, five backward.
    ///
    /// The visible pairs are counted query by query; a [custom](Mask::custom) mask is asked pair by pair.
    ///
    /// # Panics
    /// If there are no heads.
    ///
    /// # Example
    /// ```
    /// use burn_sp::attention::Mask;
    /// use burn_sp::layout::{AttentionWorkload, Links, MeshShape};
    ///
    /// let workload = AttentionWorkload {
    ///     batch: 1,
    ///     tokens: 4096,
    ///     heads: 6,
    ///     kv_heads: 6,
    ///     head_dim: 64,
    ///     element_bytes: 4,
    ///     mask: Mask::Causal,
    /// };
    /// let mesh = |ranks| MeshShape::choose(ranks, &workload, &Links::threads()).unwrap().mesh;
    /// assert_eq!(mesh(2), MeshShape::ulysses(2));
    /// // 6 heads on 4 ranks would be 2, 2, 1, 1.
    /// assert_eq!(mesh(4), MeshShape::ring(2).with_ulysses(2));
    /// ```
    pub fn choose(ranks: usize, workload: &AttentionWorkload, links: &Links) -> Option<MeshChoice> {
        let (heads, kv_heads) = (workload.heads, workload.kv_heads);
        assert!(
            heads > 0 && kv_heads > 0,
            "mesh: {heads} heads and {kv_heads} key/value heads, expected at least 1 of each"
        );
        let ulysses = (1..=ranks).rev().filter(|ulysses| ranks.is_multiple_of(*ulysses));
        let meshes = ulysses.map(|ulysses| Self::ulysses(ulysses).with_ring(ranks / ulysses));
        let meshes: Vec<_> = meshes.filter(|mesh| mesh.fits(workload.tokens)).collect();
        if meshes.is_empty() {
            return None;
        }
        let pairs = workload.visible_pairs();
        let costs = meshes.into_iter().map(|mesh| workload.cost(mesh, pairs, links));
        let mut costs: Vec<Cost> = costs.collect();
        // Stable, so that of equals the one with more ulysses comes first.
        costs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let best = costs.first()?;
        Some(MeshChoice {
            mesh: best.mesh,
            reason: reason(heads, best, costs.get(1)),
        })
    }
}

/// What a layer costs on a mesh, beside what it costs on every mesh.
struct Cost {
    mesh: MeshShape,
    /// Waiting, forward and backward.
    seconds: f64,
    /// Bytes that a rank sends, forward and backward.
    bytes: f64,
    /// The share of the time of attention in which ranks have no head to work on.
    idle: f64,
}

/// Bytes that a rank sends in a pass, in the exchanges of ulysses and in the hops of the ring: the mean over the ranks.
struct Sent {
    exchanged: f64,
    shifted: f64,
}

// Products are of `f64`s: a length that no memory holds must not overflow.
impl AttentionWorkload {
    /// Bytes that a rank sends forward: the mean over the ranks.
    ///
    /// # Panics
    /// If there are no heads.
    pub fn forward_bytes(&self, mesh: &MeshShape) -> f64 {
        let sent = self.forward(mesh);
        sent.exchanged + sent.shifted
    }

    /// Bytes that a rank sends backward: the mean over the ranks.
    ///
    /// # Panics
    /// If there are no heads.
    pub fn backward_bytes(&self, mesh: &MeshShape) -> f64 {
        let sent = self.backward(mesh);
        sent.exchanged + sent.shifted
    }

    fn forward(&self, mesh: &MeshShape) -> Sent {
        self.sent(mesh, self.element_bytes, self.element_bytes)
    }

    fn backward(&self, mesh: &MeshShape) -> Sent {
        // Terms of a gradient travel in the dtype in which they are added.
        let term = self.element_bytes.max(4);
        let shared = self.kv_heads_read(mesh.ulysses) > self.kv_heads;
        let exchanged = if shared { term } else { self.element_bytes };
        self.sent(mesh, exchanged, self.element_bytes + term)
    }

    /// A pass that sends so many bytes for an element of the keys or values, exchanged and shifted.
    fn sent(&self, mesh: &MeshShape, exchanged: usize, shifted: usize) -> Sent {
        let (u, r) = (mesh.ulysses as f64, mesh.ring as f64);
        // Of a rank, in one head.
        let elements = self.batch as f64 * self.tokens as f64 * self.head_dim as f64 / (u * r);
        let (heads, kv_heads) = (self.heads as f64, self.kv_heads_read(mesh.ulysses) as f64);
        let token = heads * self.element_bytes as f64 + kv_heads * exchanged as f64;
        Sent {
            exchanged: 2.0 * elements * token * (u - 1.0) / u,
            shifted: 2.0 * elements * kv_heads * shifted as f64 * (r - 1.0),
        }
    }

    /// The key/value heads, each as often as ranks of ulysses read it.
    fn kv_heads_read(&self, ulysses: usize) -> usize {
        let ratio = (self.heads / self.kv_heads).max(1);
        let heads = Parts::contiguous(self.heads, ulysses);
        (0..ulysses)
            .flat_map(|rank| heads.of(rank))
            .filter(|own| !own.is_empty())
            .map(|own| (own.end - 1) / ratio - own.start / ratio + 1)
            .sum()
    }

    /// The (query, key) pairs of a sequence that the mask leaves.
    fn visible_pairs(&self) -> f64 {
        let all = Positions::whole(self.tokens);
        self.mask.visible_pairs(&all, &all) as f64
    }

    fn cost(&self, mesh: MeshShape, pairs: f64, links: &Links) -> Cost {
        let (u, r) = (mesh.ulysses, mesh.ring);
        let (forward, backward) = (self.forward(&mesh), self.backward(&mesh));
        let exchanged = forward.exchanged + backward.exchanged;
        let shifted = forward.shifted + backward.shifted;
        let hidden_size = self.heads as f64 * self.head_dim as f64;
        let attention = 14.0 * self.batch as f64 * hidden_size * pairs / (mesh.ranks() as f64 * links.flops_per_second);

        let rate = |in_node: bool| match in_node {
            true => links.bytes_per_second_in_node,
            false => links.bytes_per_second_between_nodes,
        };
        let one_node = mesh.ranks() <= links.ranks_per_node;
        // Ranks of ulysses are consecutive.
        let exchange = exchanged / rate(one_node || links.ranks_per_node.is_multiple_of(u));
        let behind = if links.overlap {
            attention * (r - 1) as f64 / r as f64
        } else {
            0.0
        };
        let shift = (shifted / rate(one_node) - behind).max(0.0);
        let stretch = (self.heads.div_ceil(u) * u) as f64 / self.heads as f64;
        Cost {
            mesh,
            seconds: exchange + shift + attention * (stretch - 1.0),
            bytes: exchanged + shifted,
            idle: 1.0 - 1.0 / stretch,
        }
    }
}

fn reason(heads: usize, best: &Cost, next: Option<&Cost>) -> String {
    // More ranks can be arranged in two ways at least.
    let Some(next) = next else {
        return "nothing to split".into();
    };
    let idle = |cost: &Cost| format!("ranks idle for {:.0} % of attention", 100.0 * cost.idle);
    let split = if best.mesh.ulysses == 1 {
        String::new()
    } else if best.idle == 0.0 {
        format!("{heads} heads split evenly; ")
    } else {
        format!("{heads} heads do not split evenly, which leaves {}; ", idle(best))
    };
    let drawback = if next.idle > best.idle {
        format!(", with {}, as {heads} heads do not split evenly", idle(next))
    } else if next.bytes < best.bytes {
        ", which take longer".into()
    } else {
        String::new()
    };
    format!(
        "{split}it sends {} a layer, rank and step, the next best, {}, {}{drawback}",
        binary(best.bytes),
        next.mesh,
        binary(next.bytes)
    )
}

/// Bytes as the tables of programs write them.
fn binary(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = ((bytes.max(1.0).log2() / 10.0) as usize).min(units.len() - 1);
    format!("{:.1} {}", bytes / 1024f64.powi(power as i32), units[power])
}
