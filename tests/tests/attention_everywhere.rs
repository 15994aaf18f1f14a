//! Every strategy and composition of up to 8 ranks, every mask, every split, lengths that do not divide, any heads: all of
//! it is generated, none picked by hand. In f64 against the definition, and by counting.

mod attention {
    pub mod problem;
}
mod common;
mod everywhere;

use attention::problem::{Problem, by_definition, flex, rms, run, splits, truth};
use burn::tensor::DType;
use burn_sp::SpTensor;
use burn_sp::attention::{KvMove, Mask, attention as attend};
use burn_sp::layout::{MeshShape, Split};
use common::{f64s, noise, ranks};
use everywhere::{masks, meshes};

/// One key/value head a query head, one for two, one for all; none divides every number of ranks.
const HEADS: [(usize, usize); 3] = [(3, 3), (6, 3), (5, 1)];

const TOKENS: [usize; 2] = [2, 13];

#[test]
fn there_are_63_meshes_of_up_to_8_ranks() {
    let distinct = meshes().iter().filter(|(_, kv)| *kv == KvMove::Ring).count();
    assert_eq!(distinct, 63);
}

#[test]
fn one_rank_in_f64_is_the_definition() {
    for tokens in [1, 2, 7, 16] {
        for mask in masks(tokens) {
            for (heads, kv_heads) in HEADS {
                let problem = Problem::new(tokens, heads, kv_heads, mask.clone()).in_dtype(DType::F64);
                let values = problem.values();
                let (found, expected) = (truth(&problem, &values), by_definition(&problem, &values));
                for ((name, found), (_, expected)) in found.all().into_iter().zip(expected.all()) {
                    let worst = found
                        .iter()
                        .zip(expected)
                        .map(|(a, b)| (a - b).abs())
                        .fold(0.0, f64::max);
                    assert!(worst < 1e-13, "{problem:?}: {name} is off by {worst:e}");
                }
            }
        }
    }
}

/// Output and gradients.
fn agrees(problem: Problem, of: impl Fn(&MeshShape) -> bool) {
    let problem = problem.in_dtype(DType::F64);
    let values = problem.values();
    let truth = by_definition(&problem, &values);
    for (mesh, kv) in meshes().into_iter().filter(|(mesh, _)| of(mesh)) {
        for split in splits() {
            let problem = problem.clone().moving(kv);
            let found = run(&problem, &values, mesh, &split, &flex());
            for ((name, found), (_, truth)) in found.all().into_iter().zip(truth.all()) {
                let error = rms(found, truth);
                assert!(
                    error < 1e-14,
                    "{problem:?} on {mesh}, {split}: {name} is off by {error:e}"
                );
            }
        }
    }
}

/// Cases 20, 21, 26 and 29 are among them: 2 and 13 tokens on up to 8 ranks, fewer heads than ranks.
fn problems() -> impl Iterator<Item = Problem> {
    TOKENS.into_iter().flat_map(|tokens| {
        masks(tokens)
            .into_iter()
            .flat_map(move |mask| HEADS.map(|(heads, kv_heads)| Problem::new(tokens, heads, kv_heads, mask.clone())))
    })
}

#[test]
fn every_layout_without_tp_gives_the_same_attention() {
    problems().for_each(|problem| agrees(problem, |mesh| mesh.tp == 1));
}

#[test]
fn every_layout_with_tp_gives_the_same_attention() {
    problems().for_each(|problem| agrees(problem, |mesh| mesh.tp > 1));
}

/// Case 30: the weights that are dropped are a function of batch, head, query and key.
#[test]
fn every_layout_drops_the_same_weights() {
    for mask in [Mask::Causal, Mask::whole_documents([5, 8])] {
        for (heads, kv_heads) in HEADS {
            let problem = Problem {
                dropout: 0.3,
                ..Problem::new(13, heads, kv_heads, mask.clone())
            };
            agrees(problem, |_| true);
        }
    }
}

/// O1, sharper: with q = 0 and one-hot values, the output of a query is one over its count at every key it sees, and 0
/// elsewhere. Cases 19, 20 and 21.
#[test]
fn every_query_sees_exactly_its_keys() {
    for tokens in [1, 7, 8] {
        for (mesh, kv) in meshes() {
            for split in splits() {
                sees_exactly(tokens, mesh, kv, &split);
            }
        }
    }
}

fn sees_exactly(tokens: usize, mesh: MeshShape, kv: KvMove, split: &Split) {
    let heads = 3;
    let one_hot: Vec<f64> = (0..2 * tokens * heads * tokens)
        .map(|i| f64::from(u8::from(i / (heads * tokens) % tokens == i % tokens)))
        .collect();
    let zeros = vec![0.0; 2 * tokens * heads * 2];
    // Keys do not matter, whatever they are.
    let keys = noise(3, zeros.len());
    ranks(mesh, |device| {
        for mask in masks(tokens) {
            let problem = Problem::new(tokens, heads, heads, mask.clone()).moving(kv);
            let shapes = [[2, tokens, heads, 2], [2, tokens, heads, 2], [2, tokens, heads, tokens]];
            let layouts = problem.layouts(mesh, split);
            let [q, k, v] = [(0, &zeros), (1, &keys), (2, &one_hot)].map(|(index, values)| -> SpTensor<4> {
                let whole = common::tensor(values, shapes[index], DType::F32, device.device());
                let layout = layouts[index].clone();
                // The values are as wide as there are tokens.
                let layout = (0..3).fold(burn_sp::layout::Layout::replicated(shapes[index]), |wide, dim| {
                    let shards = layout.shards(dim).iter().cloned();
                    shards.fold(wide, |wide, (axis, split)| wide.shard(dim, axis, split))
                });
                device.distribute(whole, &layout)
            });
            let out = attend(q, k, v, &problem.options());
            let positions: Vec<usize> = out.positions(1).iter().collect();
            let local_heads = out.local().dims()[2];
            for (index, row) in f64s(out.local()).chunks(tokens).enumerate() {
                let query = positions[index / local_heads % positions.len()];
                let seen: Vec<usize> = (0..tokens).filter(|key| mask.visible(query, *key)).collect();
                let context = format!("{mask:?}, {tokens} tokens on {mesh}, {split}, query {query}: {row:?}");
                for (key, weight) in row.iter().enumerate() {
                    if seen.contains(&key) {
                        assert_eq!((1.0 / weight).round() as usize, seen.len(), "{context}, key {key}");
                        assert!((weight * seen.len() as f64 - 1.0).abs() <= 1e-6, "{context}, key {key}");
                    } else {
                        assert_eq!(*weight, 0.0, "{context}, key {key}");
                    }
                }
            }
        }
    });
}
