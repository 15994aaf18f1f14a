//! Logits through a cache, chunk by chunk, against those of a pass without one.

use burn::tensor::DType;
use burn_sp::attention::Mask;
use burn_sp::layout::MeshShape;
use burn_sp_models::transformer::{Transformer, TransformerConfig};

use super::tiny::{self, Lies, Lies::Shared, Lies::Whole, Plan, plan};
use crate::common::{largest, mesh, near};

const BATCH: usize = 2;

fn cached(model: &Transformer, plan: &[(usize, Lies)], mask: &Mask, mesh: MeshShape) -> Vec<f64> {
    let count = plan.iter().map(|(count, _)| count).sum();
    let of = |device: burn_sp::SpDevice, model: Transformer| {
        let tokens = tiny::tensor(&tiny::ids(BATCH, count), BATCH, device.device());
        tiny::through_cache(&model, &tokens, plan, mask, &device).0
    };
    let mut all = tiny::ranks(mesh, model, of);
    for other in &all[1..] {
        near(other, &all[0], 0.0, &format!("{plan:?}, {mesh}: another rank"));
    }
    all.swap_remove(0)
}

fn at_once(model: &Transformer, count: usize, mask: &Mask) -> Vec<f64> {
    tiny::one_rank(model, |device, model| {
        let tokens = tiny::tensor(&tiny::ids(BATCH, count), BATCH, device.device());
        tiny::at_once(&model, &tokens, mask, &device)
    })
}

/// Every plan on every mesh, in f64.
fn agree(config: &TransformerConfig, plans: &[Plan], mask: &Mask, meshes: &[MeshShape]) {
    let model = tiny::model(config, DType::F64);
    for plan in plans {
        let expected = at_once(&model, plan.iter().map(|(count, _)| count).sum(), mask);
        let scale = largest(&expected);
        for mesh in meshes {
            let what = format!("{plan:?}, {mask:?}, {mesh}");
            near(&cached(&model, plan, mask, *mesh), &expected, 1e-12 * scale, &what);
        }
    }
}

/// Fewer tokens than ranks, lengths that do not divide, as many samples as there are replicas.
#[test]
fn a_prompt_and_then_token_by_token() {
    let plans = [plan(1, 5), plan(2, 5), plan(3, 2), plan(7, 5), plan(13, 3)];
    let meshes: Vec<_> = tiny::meshes()
        .into_iter()
        .chain([mesh(2, 1, 2), mesh(2, 2, 1)])
        .collect();
    for config in [tiny::llama(), tiny::gpt2()] {
        agree(&config, &plans, &Mask::Causal, &meshes);
    }
}

/// Chunks of any lengths, also a first one that is whole, and single tokens of which one rank has each.
#[test]
fn a_prompt_in_chunks() {
    let plans = [
        vec![(5, Shared), (3, Shared), (4, Shared), (1, Whole)],
        vec![(1, Whole), (1, Whole), (9, Shared), (1, Whole), (2, Whole)],
        vec![(3, Whole), (2, Shared), (1, Shared), (1, Shared), (6, Shared)],
        vec![(8, Shared), (5, Whole), (1, Whole)],
    ];
    for config in [tiny::llama(), tiny::gpt2()] {
        agree(&config, &plans, &Mask::Causal, &tiny::meshes());
    }
}

/// So many that all ranks have runs of the tokens that are whole on them, and single ones go from one rank to the next.
#[test]
fn long_texts() {
    let singles = |count| vec![(1, Whole); count];
    let plans = [
        [
            vec![(61, Shared)],
            singles(6),
            vec![(130, Whole), (70, Shared)],
            singles(2),
        ]
        .concat(),
        [vec![(190, Whole)], singles(4), vec![(3, Shared), (1, Whole)]].concat(),
    ];
    for mask in [Mask::Causal, Mask::Window { size: 20, sink: 3 }] {
        agree(&tiny::llama(), &plans, &mask, &tiny::meshes());
    }
}

/// What a window hides is dropped, between chunks and within them.
#[test]
fn under_a_window() {
    let plans = [
        plan(9, 6),
        plan(1, 7),
        vec![(5, Shared), (4, Shared), (1, Whole), (4, Shared)],
    ];
    for (size, sink) in [(4, 0), (3, 2), (1, 0), (1, 3), (20, 1)] {
        agree(&tiny::llama(), &plans, &Mask::Window { size, sink }, &tiny::meshes());
    }
}

/// As many key/value heads as query heads, one for all, more ranks than heads.
#[test]
fn any_heads() {
    for (heads, kv_heads) in [(4, 4), (4, 1), (2, 1), (3, 3)] {
        let mut config = tiny::llama();
        (config.heads, config.kv_heads) = (heads, kv_heads);
        let meshes = [
            mesh(1, 1, 4),
            mesh(1, 2, 2),
            MeshShape::tp(4),
            MeshShape::tp(2).with_ulysses(2),
        ];
        agree(&config, &[plan(6, 3)], &Mask::Causal, &meshes);
    }
}

/// In f32, against f64: no mesh is further off, in the mean, than one rank that recomputes everything.
#[test]
fn in_f32_it_is_a_matter_of_rounding() {
    for config in [tiny::llama(), tiny::gpt2()] {
        let [narrow, wide] = [DType::F32, DType::F64].map(|dtype| tiny::model(&config, dtype));
        let truth = at_once(&wide, 18, &Mask::Causal);
        let error = |found: &[f64]| {
            let squares = found.iter().zip(&truth).map(|(a, b)| (a - b).powi(2));
            (squares.sum::<f64>() / truth.len() as f64).sqrt()
        };
        let one = error(&at_once(&narrow, 18, &Mask::Causal));
        for mesh in tiny::meshes() {
            let found = error(&cached(&narrow, &plan(13, 5), &Mask::Causal, mesh));
            assert!(
                found <= 1.5 * one,
                "{mesh}: {found:e}, one rank without a cache {one:e}"
            );
        }
    }
}
