//! What cannot work with a cache is refused, and said in words.

use burn::module::Module;
use burn::tensor::{DType, Tensor};
use burn_sp::attention::{AttentionCache, AttentionOptions, Mask, cached_attention};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::nn::DropoutKey;
use burn_sp::{SpDevice, launch, launch_module};
use burn_sp_models::transformer::{ForwardOptions, GenerateOptions, KvCache, Transformer, generate};

use super::tiny::{self, Lies, Lies::Shared, Lies::Whole};
use crate::common::{config, contains, device, mesh};

fn failure(mesh: MeshShape, model: &Transformer, body: impl Fn(SpDevice, Transformer) + Send + Sync) -> String {
    match launch_module(&config(mesh), &device(), model.clone(), body) {
        Ok(_) => panic!("{mesh}: no rank failed"),
        Err(error) => error.to_string(),
    }
}

/// Chunks under these masks.
fn chunks(model: &Transformer, chunks: &[(usize, Lies, Mask)]) -> String {
    failure(MeshShape::default(), model, |device, model| {
        let mut cache = KvCache::new();
        for (count, lies, mask) in chunks {
            let options = ForwardOptions {
                mask: mask.clone(),
                ..ForwardOptions::default()
            };
            let tokens = tiny::tensor(&tiny::ids(1, *count), 1, device.device());
            drop(model.forward_cached(tiny::lay(tokens, *lies, &device), &mut cache, &options));
        }
    })
}

#[test]
fn the_end_of_learned_positions() {
    let model = tiny::model(&tiny::gpt2(), DType::F32);
    let found = chunks(
        &model,
        &[
            (47, Shared, Mask::Causal),
            (1, Whole, Mask::Causal),
            (1, Whole, Mask::Causal),
        ],
    );
    contains(&found, &["position 48 has no learned embedding; there are 48"]);
}

#[test]
fn masks_that_a_cache_cannot_keep() {
    let model = tiny::model(&tiny::llama(), DType::F32);
    let found = chunks(&model, &[(3, Shared, Mask::Full)]);
    contains(&found, &["under Full", "use Mask::Causal, or a Mask::Window"]);
    let window = Mask::Window { size: 2, sink: 0 };
    let found = chunks(&model, &[(3, Shared, window.clone()), (1, Whole, Mask::Causal)]);
    contains(&found, &["it was begun under Window", "Causal comes now"]);
    let found = chunks(&model, &[(3, Shared, Mask::Window { size: 0, sink: 4 })]);
    contains(&found, &["a Mask::Window of at least 1"]);
}

#[test]
fn gradients_and_dropout() {
    let model = tiny::model(&tiny::llama(), DType::F32);
    let autodiff = launch_module(
        &config(MeshShape::default()),
        &device().autodiff(),
        model.clone().train(),
        |device, model| {
            let tokens = tiny::lay(tiny::tensor(&[1], 1, device.device()), Whole, &device);
            drop(model.forward_cached(tokens, &mut KvCache::new(), &ForwardOptions::default()));
        },
    );
    let found = autodiff.expect_err("refused").to_string();
    contains(&found, &["autodiff device", "use model.valid() and device.inner()"]);
    let found = failure(MeshShape::default(), &model, |device, model| {
        let tokens = tiny::lay(tiny::tensor(&[1], 1, device.device()), Whole, &device);
        let key = DropoutKey {
            seed: 1,
            step: 1,
            layer: 0,
        };
        let options = ForwardOptions {
            dropout: Some(key),
            ..ForwardOptions::default()
        };
        drop(model.forward_cached(tokens, &mut KvCache::new(), &options));
    });
    contains(&found, &["give no dropout"]);
}

/// On one axis, but not on the other.
#[test]
fn tokens_that_are_shared_out_by_half() {
    let model = tiny::model(&tiny::llama(), DType::F32);
    let found = failure(mesh(1, 2, 2), &model, |device, model| {
        let tokens = tiny::tensor(&tiny::ids(1, 8), 1, device.device());
        let layout = Layout::replicated([1, 8]).shard(1, Axis::Ring, Split::Contiguous);
        let tokens = device.distribute(tokens, &layout);
        drop(model.forward_cached(tokens, &mut KvCache::new(), &ForwardOptions::default()));
    });
    contains(
        &found,
        &["shard both over [Ring, Ulysses], or give every rank all of them"],
    );
}

/// Over an axis of whose ranks each is to keep some of the tokens, they would have but some of the heads or samples of these.
#[test]
fn heads_or_samples_on_the_axes_of_the_tokens() {
    let refused = |mesh: MeshShape, layouts: [Layout; 3], axis: &str| {
        let launched = launch(&config(mesh), &device(), |device| {
            let [q, k, v] = layouts.clone().map(|layout| {
                let shape = <[usize; 4]>::try_from(layout.shape()).expect("four dimensions");
                device.distribute(Tensor::<4>::zeros(shape, device.device()), &layout)
            });
            let options = AttentionOptions::from(Mask::Causal);
            drop(cached_attention(q, k, v, &mut AttentionCache::default(), &options));
        });
        let found = launched.expect_err("refused").to_string();
        contains(
            &found,
            &["cached_attention", &format!("{axis} shares out samples or heads")],
        );
        contains(
            &found,
            &["samples over Dp, heads over Tp, and tokens over Ring and Ulysses"],
        );
    };
    let whole = Layout::replicated([2, 6, 4, 8]);
    let over = |dim: usize, axis: Axis| whole.clone().shard(dim, axis, Split::Contiguous);
    let same = |layout: Layout| [layout.clone(), layout.clone(), layout];
    refused(MeshShape::ulysses(2), same(over(2, Axis::Ulysses)), "ulysses");
    refused(MeshShape::ulysses(2), same(over(0, Axis::Ulysses)), "ulysses");
    refused(MeshShape::ring(2), same(over(0, Axis::Ring)), "ring");
    // The queries alone.
    let queries = [over(2, Axis::Ulysses), whole.clone(), whole.clone()];
    refused(MeshShape::ulysses(2), queries, "ulysses");
    // On one of two axes.
    let both = over(1, Axis::Ring).shard(2, Axis::Ulysses, Split::Contiguous);
    refused(mesh(1, 2, 2), same(both), "ulysses");
}

#[test]
fn another_models_cache() {
    let model = tiny::model(&tiny::llama(), DType::F32);
    let found = failure(MeshShape::default(), &model, |device, mut model| {
        let (mut cache, options) = (KvCache::new(), ForwardOptions::default());
        let token = || tiny::lay(tiny::tensor(&[1], 1, device.device()), Whole, &device);
        drop(model.forward_cached(token(), &mut cache, &options));
        model.blocks.truncate(1);
        drop(model.forward_cached(token(), &mut cache, &options));
    });
    contains(&found, &["it is that of a model of 2 blocks, not of 1"]);
}

#[test]
fn texts_that_cannot_be_written() {
    let refused = |model: &Transformer, prompt: &[u32], options: &GenerateOptions, mesh: MeshShape| {
        failure(mesh, model, |device, model| {
            drop(generate(&model, prompt, options, &device, |_| {}));
        })
    };
    let [llama, gpt2] = [tiny::llama(), tiny::gpt2()].map(|config| tiny::model(&config, DType::F32));
    let (one, ten) = (MeshShape::default(), GenerateOptions::new(10));
    contains(&refused(&llama, &[], &ten, one), &["a prompt of no tokens"]);
    contains(
        &refused(&llama, &[1, 32], &ten, one),
        &["token 32 of the prompt", "which has 32"],
    );
    contains(
        &refused(&llama, &[1], &ten, one.with_dp(2)),
        &["one prompt on 2 data-parallel ranks"],
    );
    let found = refused(&gpt2, &tiny::ids(1, 40), &ten, one);
    contains(
        &found,
        &["40 tokens and 10 more need 49 positions", "knows 48; add 9 at most"],
    );
    let found = refused(&gpt2, &tiny::ids(1, 49), &ten, one);
    contains(&found, &["a prompt of 49 tokens is longer than the 48 positions"]);
    let chunk = GenerateOptions {
        chunk: Some(0),
        ..ten.clone()
    };
    contains(&refused(&llama, &[1], &chunk, one), &["chunk 0"]);
    let full = GenerateOptions {
        mask: Mask::Full,
        ..ten
    };
    contains(
        &refused(&llama, &[1], &full, one),
        &["Full: tokens that come one after another"],
    );
}
