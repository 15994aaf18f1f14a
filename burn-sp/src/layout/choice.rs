//! The mesh that a user gets who names only the number of ranks.

use std::fmt;

use burn_sp_comm::Parts;
use kernels_cubecl::{Mask, Positions};

use super::{MeshShape, Split};

/// With every hop hidden, a zigzag ring still reached only 90.2 % of the ideal speed (ring-flash-attention on 8 H800,
/// forward and backward): blocks are smaller, and their results are merged.
const RING_LOSS: f64 = 1.0 / 0.902 - 1.0;

/// One attention layer, as far as the choice of a mesh depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionWorkload {
    /// Sequences that the ranks share.
    pub batch: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; a divisor of the query heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Who sees whom.
    pub mask: Mask,
}

/// How fast ranks compute and reach each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// FLOP/s of a rank in attention.
    pub flops: f64,
    /// Bytes/s that a rank sends to ranks of its node.
    pub inner: f64,
    /// Bytes/s that a rank sends to ranks of other nodes.
    pub outer: f64,
    /// Ranks of a node; nodes have consecutive ranks.
    pub node: usize,
    /// Whether data travel while a rank computes, so that the hops of a ring can hide behind its blocks.
    pub overlap: bool,
}

impl Links {
    /// Ranks that are threads of one process: about 40 GFLOP/s and 4 GB/s a core, what today's CPUs reach in attention
    /// and in copies. The core that computes is the one that copies, so nothing hides.
    pub fn threads() -> Self {
        Self {
            flops: 40e9,
            inner: 4e9,
            outer: 4e9,
            node: usize::MAX,
            overlap: false,
        }
    }

    /// Devices with links of this speed between any two of them, whose transfers do not disturb computing.
    pub fn devices(flops: f64, bytes_per_second: f64) -> Self {
        Self {
            flops,
            inner: bytes_per_second,
            outer: bytes_per_second,
            node: usize::MAX,
            overlap: true,
        }
    }

    /// The same, but in nodes of so many ranks with links of another speed between them.
    ///
    /// # Panics
    /// If a node has no rank.
    pub fn with_nodes(self, ranks: usize, bytes_per_second: f64) -> Self {
        assert!(ranks > 0, "links: a node has 0 ranks, expected at least 1");
        Self {
            node: ranks,
            outer: bytes_per_second,
            ..self
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

impl fmt::Display for MeshChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.mesh, self.reason)
    }
}

impl MeshShape {
    /// The mesh of the two sequence axes, `ring x ulysses = ranks`, on which a training step waits least; none if there
    /// are more ranks than tokens. Where meshes are alike, the one with more ulysses.
    ///
    /// What counts for a layer, forward and backward, with `s` tokens, batch `b`, `h = heads * head_dim`,
    /// `g = kv_heads / heads`, `P = ranks = u r` for `u` ranks of ulysses inside `r` of ring, FLOP/s `F`:
    ///
    /// - **Elements sent**, a rank and forward: ulysses `(2 + 2g) b (s h / P) (u - 1) / u` (arXiv 2309.14509),
    ///   ring `2g b (s h / u) (r - 1) / r` (arXiv 2310.01889). Where `u` does not divide the key/value heads, `g` counts
    ///   a head once for every rank that reads it. Backward, ulysses sends the same again; the ring sends keys and
    ///   values again, and as many gradients of them, in f32 at least. So *forward* a ring alone sends less than ulysses
    ///   alone only if `g < 1 / (P - 1)`.
    /// - **What hides.** Where transfers overlap, a hop hides behind a block that takes as long to compute:
    ///   `s / r >= (g / 2) * (bytes of an element) * F / (bytes/s)` tokens, for 16-bit elements and `g = 1` FLOP/s over
    ///   bytes/s (arXiv 2310.01889: 1,040 tokens for A100 with NVLink, 24,960 with InfiniBand); a mask that
    ///   leaves a share of the pairs needs a block as many times longer. Even then a ring loses about a tenth of the
    ///   time of attention. The exchanges of ulysses never hide.
    /// - **Idle ranks.** `u` ranks take `ceil(heads / u) u / heads` times as long as if heads were split evenly. Attention
    ///   takes `14 b h (visible pairs) / (P F)` seconds: two products forward, five backward.
    ///
    /// # Panics
    /// If there are no heads.
    pub fn choose(ranks: usize, workload: &AttentionWorkload, links: &Links) -> Option<MeshChoice> {
        let (heads, kv_heads) = (workload.heads, workload.kv_heads);
        assert!(
            heads > 0 && kv_heads > 0,
            "mesh: {heads} heads and {kv_heads} key/value heads, expected at least 1 of each"
        );
        let fits = |mesh: &MeshShape| {
            let ring = Split::Zigzag.parts(workload.tokens, mesh.ring);
            (0..mesh.ring).all(|rank| ring.len_of(rank) >= mesh.ulysses)
        };
        let meshes = (1..=ranks).rev().filter(|ulysses| ranks.is_multiple_of(*ulysses));
        let meshes = meshes.map(|ulysses| MeshShape {
            ring: ranks / ulysses,
            ..MeshShape::ulysses(ulysses)
        });
        let pairs = workload.visible_pairs();
        let meshes = meshes.filter(fits);
        let mut costs: Vec<Cost> = meshes.map(|mesh| workload.cost(mesh, pairs, links)).collect();
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

impl AttentionWorkload {
    /// Bytes that a rank sends forward: the mean over the ranks.
    pub fn forward_bytes(&self, mesh: &MeshShape) -> f64 {
        let (exchanged, shifted) = self.elements(mesh);
        (exchanged + shifted) * self.element_bytes as f64
    }

    /// Bytes that a rank sends backward: the mean over the ranks.
    pub fn backward_bytes(&self, mesh: &MeshShape) -> f64 {
        let (exchanged, shifted) = self.elements(mesh);
        exchanged * self.element_bytes as f64 + shifted * (self.element_bytes + self.gradient_bytes()) as f64
    }

    /// Elements that a rank sends forward in the exchanges of ulysses and in the hops of the ring.
    fn elements(&self, mesh: &MeshShape) -> (f64, f64) {
        let (u, r) = (mesh.ulysses as f64, mesh.ring as f64);
        let tokens = (self.batch * self.tokens * self.head_dim) as f64 / (u * r);
        let kv_heads = self.kv_heads_read(mesh.ulysses) as f64;
        let exchanged = 2.0 * tokens * (self.heads as f64 + kv_heads) * (u - 1.0) / u;
        (exchanged, 2.0 * tokens * kv_heads * (r - 1.0))
    }

    /// Terms of key and value gradients travel in the dtype in which they are added.
    fn gradient_bytes(&self) -> usize {
        self.element_bytes.max(4)
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

    /// Tokens that a block needs for a hop to hide behind it where every query sees every key, if links send so many
    /// bytes a second and ranks read so many key/value heads in all.
    fn hiding_block(&self, kv_heads: usize, flops: f64, bytes_per_second: f64) -> f64 {
        let g = kv_heads as f64 / self.heads as f64;
        g / 2.0 * self.element_bytes as f64 * flops / bytes_per_second
    }

    fn cost(&self, mesh: MeshShape, pairs: f64, links: &Links) -> Cost {
        let (u, r) = (mesh.ulysses, mesh.ring);
        let (exchanged, shifted) = self.elements(&mesh);
        let exchanged = 2.0 * exchanged * self.element_bytes as f64;
        let shifted = shifted * (2 * self.element_bytes + self.gradient_bytes()) as f64;
        let hidden_size = (self.batch * self.heads * self.head_dim) as f64;
        let attention = 14.0 * hidden_size * pairs / (mesh.ranks() as f64 * links.flops);

        // The worst-placed rank of ulysses has so many of its group in its node.
        let one_node = mesh.ranks() <= links.node;
        let near = if one_node { u } else { common_divisor(u, links.node) };
        let to_each = exchanged / (u - 1).max(1) as f64;
        let exchange = to_each * ((near - 1) as f64 / links.inner + (u - near) as f64 / links.outer);
        // A ring is as slow as its slowest link.
        let rate = if one_node { links.inner } else { links.outer };
        let whole = shifted / rate;
        let shift = if links.overlap {
            // As many tokens as would be as much work if every query saw every key.
            let block = pairs / (self.tokens * r) as f64;
            let hidden = block / self.hiding_block(self.kv_heads_read(u), links.flops, rate);
            (whole * (1.0 - hidden)).max(RING_LOSS * attention).min(whole)
        } else {
            whole
        };
        let stretch = (self.heads.div_ceil(u) * u) as f64 / self.heads as f64;
        Cost {
            mesh,
            seconds: exchange + shift + attention * (stretch - 1.0),
            bytes: exchanged + shifted,
            idle: 1.0 - 1.0 / stretch,
        }
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

fn reason(heads: usize, best: &Cost, other: Option<&Cost>) -> String {
    let Some(other) = other else {
        return "nothing to split".into();
    };
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let split = if best.mesh.ulysses == 1 {
        String::new()
    } else if best.idle == 0.0 {
        format!("{heads} heads split evenly; ")
    } else {
        let idle = percent(best.idle);
        format!("{heads} heads do not split evenly, which leaves ranks idle for {idle} of attention; ")
    };
    let less = other.bytes < best.bytes;
    let drawback = if other.idle > best.idle {
        let (but, idle) = (if less { ", but" } else { " and" }, percent(other.idle));
        format!("{but} leave ranks idle for {idle} of attention, as {heads} heads do not split evenly")
    } else if less {
        ", but wait longer for it".into()
    } else {
        String::new()
    };
    format!(
        "{split}it sends {} a layer and rank, {} would send {}{drawback}",
        binary(best.bytes),
        other.mesh,
        binary(other.bytes)
    )
}

/// Bytes as the tables of programs write them.
fn binary(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = ((bytes.max(1.0).log2() / 10.0) as usize).min(units.len() - 1);
    format!("{:.1} {}", bytes / 1024f64.powi(power as i32), units[power])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(tokens: usize, heads: usize, kv_heads: usize) -> AttentionWorkload {
        AttentionWorkload {
            batch: 1,
            tokens,
            heads,
            kv_heads,
            head_dim: 64,
            element_bytes: 4,
            mask: Mask::Causal,
        }
    }

    fn choose(ranks: usize, workload: &AttentionWorkload) -> MeshChoice {
        MeshShape::choose(ranks, workload, &Links::threads()).expect("more tokens than ranks")
    }

    fn both(ring: usize, ulysses: usize) -> MeshShape {
        MeshShape {
            ring,
            ..MeshShape::ulysses(ulysses)
        }
    }

    #[test]
    fn heads_that_split_evenly_are_exchanged() {
        for ranks in [2, 4, 8] {
            assert_eq!(choose(ranks, &workload(4096, 8, 8)).mesh, MeshShape::ulysses(ranks));
        }
        // A prime number of ranks.
        assert_eq!(choose(7, &workload(4096, 14, 14)).mesh, MeshShape::ulysses(7));
        // Forward and backward 2 * 4 * (1024 * 512 / 4) * 3/4 elements of 4 bytes; two of ring and two of ulysses send
        // 2 * 4 * (1024 * 512 / 4) / 2 and 3 * 2 * (1024 * 512 / 2) / 2.
        assert_eq!(
            choose(4, &workload(1024, 8, 8)).to_string(),
            "ulysses 4 (8 heads split evenly; it sends 3.0 MiB a layer and rank, ring 2 x ulysses 2 would send 5.0 MiB)"
        );
    }

    #[test]
    fn one_rank_has_nothing_to_split() {
        let choice = choose(1, &workload(5, 3, 1));
        assert_eq!(
            (choice.mesh, choice.reason.as_str()),
            (MeshShape::default(), "nothing to split")
        );
    }

    #[test]
    fn heads_that_do_not_divide_stay_where_they_are() {
        let choice = choose(5, &workload(4096, 8, 8));
        assert_eq!(choice.mesh, MeshShape::ring(5));
        let words = "but leave ranks idle for 20 % of attention, as 8 heads do not split evenly";
        assert!(choice.reason.ends_with(words), "{}", choice.reason);
        // 3 heads each on two ranks, and two such pairs.
        assert_eq!(choose(4, &workload(4096, 6, 6)).mesh, both(2, 2));
        // Of few tokens, more of the time is spent sending than idle.
        assert_eq!(choose(4, &workload(8, 6, 6)).mesh, MeshShape::ulysses(4));
    }

    #[test]
    fn uneven_heads_take_as_long_as_the_longest_share() {
        let (work, links) = (workload(4096, 6, 6), Links::threads());
        let pairs = 4096.0 * 4097.0 / 2.0;
        assert_eq!(work.visible_pairs(), pairs);
        let cost = work.cost(MeshShape::ulysses(4), pairs, &links);
        // 2 heads where 1.5 would be even.
        let attention = 14.0 * 6.0 * 64.0 * pairs / (4.0 * links.flops);
        let exchange = 2.0 * 4.0 * (4.0 * 4096.0 * 384.0 / 4.0 * 0.75) / links.inner;
        assert!((cost.seconds - exchange - attention / 3.0).abs() < 1e-12 * cost.seconds);
        assert_eq!(cost.idle, 0.25);
    }

    /// Published: forward, a ring sends less than ulysses only if g < 1 / (P - 1).
    #[test]
    fn a_ring_sends_less_only_with_few_key_value_heads() {
        for ranks in 2..=8 {
            for ratio in 1..=16 {
                // As many key/value heads as ranks.
                let work = workload(4096, ranks * ratio, ranks);
                let ring = work.forward_bytes(&MeshShape::ring(ranks));
                let ulysses = work.forward_bytes(&MeshShape::ulysses(ranks));
                assert_eq!(
                    ring < ulysses * (1.0 - 1e-9),
                    ratio > ranks - 1,
                    "g = 1/{ratio} on {ranks} ranks"
                );
            }
        }
    }

    #[test]
    fn bytes_follow_the_formulas() {
        // 2 sequences of 12 tokens, h = 4 * 64, g = 1/2, P = 2 * 2, bf16.
        let work = AttentionWorkload {
            batch: 2,
            element_bytes: 2,
            ..workload(12, 4, 2)
        };
        let sh = 2 * 12 * 256;
        let exchanged = 3 * sh / 4 / 2;
        let shifted = sh / 2 / 2;
        assert_eq!(work.forward_bytes(&both(2, 2)), (2 * (exchanged + shifted)) as f64);
        // Gradients of keys and values go home in f32.
        assert_eq!(
            work.backward_bytes(&both(2, 2)),
            (2 * exchanged + (2 + 4) * shifted) as f64
        );
        // On 4 ranks of ulysses each of the 2 key/value heads is read twice: as if g were 1.
        assert_eq!(
            work.forward_bytes(&MeshShape::ulysses(4)),
            (2 * (4 * sh / 4 * 3 / 4)) as f64
        );
    }

    #[test]
    fn one_key_value_head_travels() {
        let choice = choose(8, &workload(4096, 32, 1));
        assert_eq!(choice.mesh, MeshShape::ring(8));
        assert!(choice.reason.starts_with("it sends "), "{}", choice.reason);
    }

    #[test]
    fn a_hop_hides_behind_a_block_of_flops_over_bytes_tokens() {
        let work = AttentionWorkload {
            element_bytes: 2,
            ..workload(4096, 8, 8)
        };
        assert_eq!(work.hiding_block(8, 312e12, 300e9), 1040.0);
        assert_eq!(work.hiding_block(8, 312e12, 12.5e9), 24_960.0);
        // Half as many key/value heads to send, half as long a block.
        assert_eq!(work.hiding_block(4, 312e12, 300e9), 520.0);
    }

    /// Two nodes of 8 A100: ulysses inside, the ring across, as its hops hide.
    #[test]
    fn slow_links_are_left_to_the_ring() {
        let links = Links::devices(312e12, 300e9).with_nodes(8, 12.5e9);
        let work = AttentionWorkload {
            element_bytes: 2,
            head_dim: 128,
            ..workload(131_072, 32, 32)
        };
        let choice = MeshShape::choose(16, &work, &links).expect("more tokens than ranks");
        assert_eq!(choice.mesh, both(2, 8), "{choice}");
        let inside = MeshShape::choose(8, &work, &links).expect("more tokens than ranks");
        assert_eq!(inside.mesh, MeshShape::ulysses(8), "{inside}");
    }

    #[test]
    fn every_rank_has_a_token() {
        for ranks in 1..=12 {
            for tokens in 1..=30 {
                for (heads, kv_heads) in [(1, 1), (3, 3), (8, 2), (12, 1)] {
                    let work = workload(tokens, heads, kv_heads);
                    let Some(choice) = MeshShape::choose(ranks, &work, &Links::threads()) else {
                        assert!(tokens < ranks, "{tokens} tokens on {ranks} ranks");
                        continue;
                    };
                    assert_eq!(choice.mesh.check(ranks), Ok(()));
                    let ring = Split::Zigzag.parts(tokens, choice.mesh.ring);
                    assert!((0..choice.mesh.ring).all(|rank| ring.len_of(rank) >= choice.mesh.ulysses));
                    assert_eq!(MeshShape::choose(ranks, &work, &Links::threads()), Some(choice));
                }
            }
        }
    }

    #[test]
    fn bytes_are_written_in_binary_units() {
        let written = [0.0, 1023.0, 1024.0, 1.5 * 1024.0 * 1024.0].map(binary);
        assert_eq!(written, ["0.0 B", "1023.0 B", "1.0 KiB", "1.5 MiB"]);
    }
}
