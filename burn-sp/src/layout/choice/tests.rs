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
    MeshShape::ring(ring).with_ulysses(ulysses)
}

/// A100 (312 TFLOP/s), eight to a node: NVLink inside, InfiniBand between.
fn a100() -> Links {
    Links {
        flops_per_second: 312e12,
        bytes_per_second_in_node: 300e9,
        bytes_per_second_between_nodes: 12.5e9,
        ranks_per_node: 8,
        overlap: true,
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
        choose(4, &workload(1024, 8, 8)),
        MeshChoice {
            mesh: MeshShape::ulysses(4),
            reason:
                "8 heads split evenly; it sends 3.0 MiB a layer, rank and step, the next best, ring 2 x ulysses 2, \
                     5.0 MiB"
                    .into()
        }
    );
}

#[test]
fn heads_that_do_not_divide_stay_where_they_are() {
    let choice = choose(5, &workload(4096, 8, 8));
    assert_eq!(choice.mesh, MeshShape::ring(5));
    let words = ", with ranks idle for 20 % of attention, as 8 heads do not split evenly";
    assert!(choice.reason.ends_with(words), "{}", choice.reason);
    // 3 heads each on two ranks, and two such pairs.
    assert_eq!(choose(4, &workload(4096, 6, 6)).mesh, both(2, 2));
    // Of few tokens, more of the time is spent sending than idle.
    let choice = choose(4, &workload(8, 6, 6));
    assert_eq!(choice.mesh, MeshShape::ulysses(4));
    let words = "6 heads do not split evenly, which leaves ranks idle for 25 % of attention; it sends";
    assert!(choice.reason.starts_with(words), "{}", choice.reason);
}

#[test]
fn uneven_heads_take_as_long_as_the_longest_share() {
    let (work, links) = (workload(4096, 6, 6), Links::threads());
    let pairs = 4096.0 * 4097.0 / 2.0;
    assert_eq!(work.visible_pairs(), pairs);
    let cost = work.cost(MeshShape::ulysses(4), pairs, &links);
    // 2 heads where 1.5 would be even.
    let attention = 14.0 * 6.0 * 64.0 * pairs / (4.0 * links.flops_per_second);
    let exchange = 2.0 * 4.0 * (4.0 * 4096.0 * 384.0 / 4.0 * 0.75) / links.bytes_per_second_in_node;
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
    let choice = choose(8, &workload(4096, 32, 1));
    assert_eq!(choice.mesh, MeshShape::ring(8));
    assert!(choice.reason.starts_with("it sends "), "{}", choice.reason);
}

/// Of 16-bit elements, a ring sends 16 bytes in a step where a block takes 14 FLOP a token of it, so blocks need 8/7 of
/// FLOP/s over bytes/s tokens, which is 1,040 here. (Forward alone it is 4 bytes and 4 FLOP.)
#[test]
fn hops_hide_behind_blocks_that_take_as_long() {
    let seconds = |block: usize| {
        let work = AttentionWorkload {
            element_bytes: 2,
            mask: Mask::Full,
            ..workload(8 * block, 8, 8)
        };
        work.cost(MeshShape::ring(8), work.visible_pairs(), &a100()).seconds
    };
    assert_eq!(seconds(1189), 0.0);
    assert!(seconds(1188) > 0.0);
}

/// Two nodes of eight: ulysses inside, the ring across, as its hops hide.
#[test]
fn slow_links_are_left_to_the_ring() {
    let work = AttentionWorkload {
        element_bytes: 2,
        head_dim: 128,
        ..workload(131_072, 32, 32)
    };
    let choice = MeshShape::choose(16, &work, &a100()).expect("more tokens than ranks");
    assert_eq!(choice.mesh, both(2, 8), "{choice:?}");
    assert!(choice.reason.ends_with(", which take longer"), "{choice:?}");
    // Where no hop hides, an exchange over the slow links is done sooner.
    let waiting = Links {
        overlap: false,
        ..a100()
    };
    let choice = MeshShape::choose(16, &work, &waiting).expect("more tokens than ranks");
    assert_eq!(choice.mesh, MeshShape::ulysses(16), "{choice:?}");
}

#[test]
fn every_number_of_ranks_gets_a_mesh_up_to_the_tokens() {
    for ranks in 1..=12 {
        for tokens in 1..=30 {
            for (heads, kv_heads) in [(1, 1), (3, 3), (8, 2), (12, 1)] {
                let choice = MeshShape::choose(ranks, &workload(tokens, heads, kv_heads), &Links::threads());
                assert_eq!(choice.is_some(), tokens >= ranks, "{tokens} tokens on {ranks} ranks");
                if let Some(choice) = choice {
                    assert_eq!(choice.mesh.check(ranks), Ok(()));
                    assert_eq!(choice.reason == "nothing to split", ranks == 1, "{choice:?}");
                }
            }
        }
    }
}

#[test]
fn absurd_lengths_do_not_overflow() {
    let work = AttentionWorkload {
        batch: usize::MAX,
        ..workload(usize::MAX, 8, 8)
    };
    assert!(work.backward_bytes(&both(2, 2)) > 1e38);
}

#[test]
fn bytes_are_written_in_binary_units() {
    let written = [0.0, 1023.0, 1024.0, 1.5 * 1024.0 * 1024.0].map(binary);
    assert_eq!(written, ["0.0 B", "1023.0 B", "1.0 KiB", "1.5 MiB"]);
}
