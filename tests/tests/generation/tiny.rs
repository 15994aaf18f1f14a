//! Tiny models, and how a sequence goes through them in chunks.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_sp::attention::Mask;
use burn_sp::layout::{Axis, Layout, MeshShape, Placement};
use burn_sp::{SpDevice, SpTensor, launch_module};
use burn_sp_models::transformer::{ForwardOptions, KvCache, Transformer, TransformerConfig};
use burn_sp_tests::cast;

use crate::common::{config, device, f64s, mesh, noise, token_meshes};

pub const VOCABULARY: usize = 32;

/// The positions of [`gpt2`].
pub const POSITIONS: usize = 48;

/// 6 query heads on 2 key/value heads.
pub fn llama() -> TransformerConfig {
    let mut config = TransformerConfig::llama(VOCABULARY, 24, 2, 6, 20);
    config.kv_heads = 2;
    config.init_std = 0.2;
    config
}

pub fn gpt2() -> TransformerConfig {
    let mut config = TransformerConfig::gpt2(VOCABULARY, 24, 2, 6, POSITIONS);
    config.init_std = 0.2;
    config
}

pub fn model(config: &TransformerConfig, dtype: DType) -> Transformer {
    cast(burn_sp::seeded(&device(), 5, |device| config.init(device)), dtype)
}

/// Those that share out tokens, heads or both; one rank among them, and more ranks on `tp` than there are key/value heads.
pub fn meshes() -> Vec<MeshShape> {
    let others = [
        MeshShape::default(),
        mesh(1, 1, 3),
        mesh(1, 3, 1),
        MeshShape::tp(2),
        MeshShape::tp(4),
        MeshShape::tp(2).with_ulysses(2),
        MeshShape::tp(2).with_ring(2),
    ];
    token_meshes().into_iter().chain(others).collect()
}

pub fn ids(batch: usize, tokens: usize) -> Vec<u32> {
    let id = |x: &f64| ((x + 1.0) * 1e5) as u32 % VOCABULARY as u32;
    noise(9, batch * tokens).iter().map(id).collect()
}

/// `[batch, tokens]`
pub fn tensor(ids: &[u32], batch: usize, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let shape = [batch, ids.len() / batch];
    Tensor::from_data(TensorData::new(ids, shape), device)
}

/// How a chunk lies on the axes that share out tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lies {
    Shared,
    Whole,
}

use Lies::{Shared, Whole};

/// Chunks of a sequence, by length.
pub type Plan = Vec<(usize, Lies)>;

/// A prompt, and tokens one by one.
pub fn plan(prompt: usize, more: usize) -> Plan {
    [vec![(prompt, Shared)], vec![(1, Whole); more]].concat()
}

/// Lays a chunk on a mesh.
pub fn lay(chunk: Tensor<2, Int>, lies: Lies, device: &SpDevice) -> SpTensor<2, Int> {
    match lies {
        Shared => device.distribute_tokens(chunk),
        Whole => {
            let layout = Layout::replicated(chunk.dims());
            device.distribute(chunk, &layout.shard(0, Axis::Dp, Default::default()))
        }
    }
}

/// The logits of all tokens, `[batch, tokens, vocabulary]`, of a pass through a cache; and what the cache then has.
pub fn through_cache(
    model: &Transformer,
    tokens: &Tensor<2, Int>,
    plan: &[(usize, Lies)],
    mask: &Mask,
    device: &SpDevice,
) -> (Vec<f64>, KvCache) {
    let options = ForwardOptions {
        mask: mask.clone(),
        ..ForwardOptions::default()
    };
    let mut cache = KvCache::new();
    let chunks = plan.iter().map(|(count, lies)| {
        let first = cache.tokens();
        let chunk = lay(tokens.clone().narrow(1, first, *count), *lies, device);
        let hidden = model.forward_cached(chunk, &mut cache, &options);
        assert_eq!(cache.tokens(), first + count);
        whole(model.logits_of(hidden, &options))
    });
    let logits: Vec<Tensor<3>> = chunks.collect();
    (f64s(&Tensor::cat(logits, 1)), cache)
}

/// The same logits, of a pass without a cache.
pub fn at_once(model: &Transformer, tokens: &Tensor<2, Int>, mask: &Mask, device: &SpDevice) -> Vec<f64> {
    let options = ForwardOptions {
        mask: mask.clone(),
        ..ForwardOptions::default()
    };
    f64s(&whole(model.logits(lay(tokens.clone(), Whole, device), &options)))
}

fn whole(logits: SpTensor<3>) -> Tensor<3> {
    logits
        .redistribute(Axis::Tp, Placement::Replicate)
        .gather()
        .into_local()
}

/// Runs the ranks with their parts of the model, on a device without autodiff.
pub fn ranks<T: Send>(
    mesh: MeshShape,
    model: &Transformer,
    body: impl Fn(SpDevice, Transformer) -> T + Send + Sync,
) -> Vec<T> {
    let shard = |device: SpDevice, model: Transformer| {
        let (model, _) = model.shard(&device);
        body(device, model)
    };
    launch_module(&config(mesh), &device(), model.clone(), shard).unwrap_or_else(|error| panic!("{mesh}: {error}"))
}

/// What one rank does.
pub fn one_rank<T: Send>(model: &Transformer, body: impl Fn(SpDevice, Transformer) -> T + Send + Sync) -> T {
    ranks(MeshShape::default(), model, body).swap_remove(0)
}
