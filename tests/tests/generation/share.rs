//! What each rank keeps, and what travels: nothing that grows with the tokens in the cache.

use std::collections::BTreeMap;

use burn::tensor::DType;
use burn_sp::SpDevice;
use burn_sp::attention::Mask;
use burn_sp::layout::MeshShape;
use burn_sp_models::transformer::{ForwardOptions, Transformer};

use super::tiny::{self, Lies::Shared, Lies::Whole, Plan, plan};
use crate::common::mesh;

/// Of an f32.
const BYTES: usize = 4;

/// Keys and values of a token: 2 key/value heads of 4 elements, in 2 layers.
const TOKEN: usize = 2 * 2 * 4 * 2 * BYTES;

/// What each rank has in the end.
fn kept(plan: &Plan, mask: &Mask, mesh: MeshShape) -> Vec<usize> {
    let model = tiny::model(&tiny::llama(), DType::F32);
    let count = plan.iter().map(|(count, _)| count).sum();
    let batch = mesh.dp;
    tiny::ranks(mesh, &model, |device: SpDevice, model: Transformer| {
        let tokens = tiny::tensor(&tiny::ids(batch, count), batch, device.device());
        tiny::through_cache(&model, &tokens, plan, mask, &device).1.bytes()
    })
}

/// Tokens that are whole on several ranks go to one after another by runs of so many, for which each makes room at once.
const RUN: usize = 64;

#[test]
fn ranks_share_the_cache() {
    let kept = |plan: &Plan, mesh| kept(plan, &Mask::Causal, mesh);
    let tokens = |counts: [usize; 4]| counts.map(|count| count * TOKEN);
    let four = mesh(1, 1, 4);
    assert_eq!(kept(&plan(263, 0), four), tokens([66, 66, 66, 65]));
    // Position 263 is in the fifth run, which ends at 320.
    assert_eq!(kept(&plan(263, 5), four), tokens([66 + RUN, 66, 66, 65]));
    let more = |count| vec![(263, Shared), (count, Whole)];
    assert_eq!(kept(&more(57), four), tokens([66 + RUN, 66, 66, 65]));
    assert_eq!(kept(&more(58), four), tokens([66 + RUN, 66 + RUN, 66, 65]));
    assert_eq!(kept(&more(200), four), tokens([66, 66, 66, 65].map(|own| own + RUN)));
    // The first rank has two runs of these, and room for no more.
    assert_eq!(
        kept(&more(313), four),
        tokens([66 + 57 + RUN, 66 + RUN, 66 + RUN, 65 + RUN])
    );
    assert_eq!(
        kept(&plan(263, 5), mesh(2, 1, 2)),
        tokens([132 + RUN, 131, 132 + RUN, 131])
    );
    // Zigzag: 8 chunks of 33 tokens.
    for mesh in [mesh(1, 4, 1), mesh(1, 2, 2)] {
        assert_eq!(kept(&plan(264, 4), mesh), tokens([66 + RUN, 66, 66, 66]), "{mesh}");
    }
    assert_eq!(kept(&plan(1, 8), mesh(1, 3, 1)), [RUN * TOKEN; 3]);
    // One of two key/value heads each.
    assert_eq!(kept(&plan(263, 5), MeshShape::tp(2)), [(263 + RUN) * TOKEN / 2; 2]);
    assert_eq!(
        kept(&plan(263, 5), MeshShape::tp(2).with_ulysses(2)),
        [132 + RUN, 132 + RUN, 131, 131].map(|count| count * TOKEN / 2)
    );
    // Of 6 query heads 2, 2, 1 and 1 a rank, 3 of which read one: the second rank's read both.
    assert_eq!(
        kept(&plan(263, 5), MeshShape::tp(4)),
        [1, 2, 1, 1].map(|heads| (263 + RUN) * TOKEN / 2 * heads)
    );
}

/// The next token sees so many before it, and the sink; the others are dropped when they are as many as a run.
#[test]
fn a_window_bounds_the_cache() {
    let mask = Mask::Window { size: 5, sink: 2 };
    let seen = (4 + 2) * TOKEN;
    for mesh in [MeshShape::default(), mesh(1, 1, 4), mesh(1, 2, 2)] {
        let all: usize = kept(&plan(400, 0), &mask, mesh).iter().sum();
        assert_eq!(all, seen, "{mesh}");
        let chunks = vec![(400, Shared), (150, Whole), (90, Shared), (300, Whole), (1, Whole)];
        let most = seen + 2 * RUN * TOKEN;
        let kept = kept(&chunks, &mask, mesh);
        assert!(
            kept.iter().all(|kept| *kept <= most),
            "{mesh}: {kept:?}, {most} at most"
        );
    }
    let one = |more| kept(&plan(1, more), &mask, MeshShape::default());
    // 70 tokens are 64 more than are seen, and so are 134 and 198; then there is room for another run.
    assert_eq!(one(197), [seen]);
    assert_eq!(one(198), [seen + RUN * TOKEN]);
    assert_eq!(
        kept(&plan(66, 0), &mask, MeshShape::default()),
        [66 * TOKEN],
        "60 are not seen any more"
    );
}

/// Calls and bytes of a rank, by operation and group.
type Sent = BTreeMap<(String, String), (u64, u64)>;

/// What the last rank sends while it reads one token more.
fn sent(prompt: usize, mesh: MeshShape) -> Sent {
    let model = tiny::model(&tiny::llama(), DType::F32);
    let mut all = tiny::ranks(mesh, &model, |device, model| {
        let ids = tiny::ids(1, prompt);
        let tokens = tiny::tensor(&ids, 1, device.device());
        let (_, mut cache) = tiny::through_cache(&model, &tokens, &plan(prompt, 0), &Mask::Causal, &device);
        let next = tiny::lay(tiny::tensor(&ids[..1], 1, device.device()), Whole, &device);
        device.mesh().world().reset_statistics();
        drop(model.forward_cached(next, &mut cache, &ForwardOptions::default()));
        let counters = device.mesh().world().statistics().into_iter();
        let counters = counters.map(|counter| ((counter.op, counter.axis), (counter.calls, counter.bytes_sent)));
        counters.collect::<Sent>()
    });
    all.pop().expect("ranks")
}

/// In each of 2 layers, to every other rank: 6 heads of 4 elements with two statistics.
#[test]
fn a_token_sends_no_more_after_many_than_after_few() {
    let of = |op: &str, axis: &str, calls: u64, bytes: usize| ((op.into(), axis.into()), (calls, bytes as u64));
    let found = |heads: usize, others: usize| 2 * others * heads * (4 + 2) * BYTES;
    // The embedding and two projections a layer are sums over tp, of 24 features.
    let sums = |axis| of("all_reduce", axis, 5, 5 * 24 * BYTES);
    for prompt in [4, 7, 160] {
        let what = |mesh: MeshShape| format!("{prompt} on {mesh}");
        let one = MeshShape::default();
        assert_eq!(sent(prompt, one), Sent::new(), "{}", what(one));
        for (mesh, axis) in [
            (mesh(1, 1, 4), "ulysses"),
            (mesh(1, 4, 1), "ring"),
            (mesh(1, 2, 2), "ring+ulysses"),
        ] {
            let expected = Sent::from([of("all_gather", axis, 2, found(6, 3))]);
            assert_eq!(sent(prompt, mesh), expected, "{}", what(mesh));
        }
        let tp = MeshShape::tp(2);
        assert_eq!(sent(prompt, tp), Sent::from([sums("tp")]), "{}", what(tp));
        let both = tp.with_ulysses(2);
        let expected = Sent::from([sums("tp"), of("all_gather", "ulysses", 2, found(3, 1))]);
        assert_eq!(sent(prompt, both), expected, "{}", what(both));
    }
}
