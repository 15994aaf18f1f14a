//! A decoder as people write it with `burn::nn`: learned positions, LayerNorm, biases, grouped heads.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::{gelu, relu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_sp::attention::{AttentionOptions, Positions, attention};
use burn_sp::layout::{Axis, Placement};
use burn_sp::nn::{Dropout, DropoutKey, Features, Gathered, row_linear, shard_columns, shard_rows};
use burn_sp::train::ParamLayouts;
use burn_sp::{SpDevice, SpTensor};

use super::fault::Fault;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 4;
pub const HIDDEN: usize = HEADS * HEAD;
const FFN: usize = 24;
pub const VOCABULARY: usize = 32;

#[derive(Module, Debug)]
pub struct Plain {
    pub embedding: Embedding,
    pub positions: Embedding,
    pub blocks: Vec<Block>,
    pub norm: LayerNorm,
    pub head: Linear,
}

#[derive(Module, Debug)]
pub struct Block {
    norm1: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

pub fn plain(device: &Device) -> Plain {
    let linear = |from, to| LinearConfig::new(from, to).init(device);
    let norm = || LayerNormConfig::new(HIDDEN).init(device);
    let block = |_| Block {
        norm1: norm(),
        query: linear(HIDDEN, HIDDEN),
        key: linear(HIDDEN, KV_HEADS * HEAD),
        value: linear(HIDDEN, KV_HEADS * HEAD),
        output: linear(HIDDEN, HIDDEN),
        norm2: norm(),
        up: linear(HIDDEN, FFN),
        down: linear(FFN, HIDDEN),
    };
    Plain {
        embedding: EmbeddingConfig::new(VOCABULARY, HIDDEN).init(device),
        positions: EmbeddingConfig::new(16, HIDDEN).init(device),
        blocks: (0..2).map(block).collect(),
        norm: norm(),
        head: LinearConfig::new(HIDDEN, VOCABULARY).with_bias(false).init(device),
    }
}

/// The outputs in order, by name.
pub type Layers = Vec<(String, SpTensor<3>)>;

impl Plain {
    pub fn shard(mut self, device: &SpDevice) -> (Self, ParamLayouts) {
        let mut layouts = ParamLayouts::replicated();
        let list = &mut layouts;
        for block in &mut self.blocks {
            let whole = block.clone();
            block.query = shard_columns(whole.query, Features::sharded(HEADS, HEAD), device, list);
            block.key = shard_columns(whole.key, Features::sharded(KV_HEADS, HEAD), device, list);
            block.value = shard_columns(whole.value, Features::sharded(KV_HEADS, HEAD), device, list);
            block.output = shard_rows(whole.output, Features::sharded(HEADS, HEAD), device, list);
            block.up = shard_columns(whole.up, Features::sharded(FFN, 1), device, list);
            block.down = shard_rows(whole.down, Features::sharded(FFN, 1), device, list);
        }
        (self, layouts)
    }

    pub fn forward(&self, tokens: SpTensor<2, Int>, fault: Fault, device: &SpDevice) -> (SpTensor<3>, Layers) {
        let positions = match fault {
            Fault::LocalPositions => Positions::whole(tokens.local().dims()[1]),
            _ => tokens.positions(1),
        };
        let x = tokens.tokenwise(|tokens| {
            let ids: Vec<i64> = positions.iter().map(|position| position as i64).collect();
            let ids = TensorData::new(ids, [1, positions.len()]);
            let ids = Tensor::<2, Int>::from_data(ids, &tokens.device());
            self.embedding.forward(tokens) + self.positions.forward(ids)
        });
        let mut x = match fault {
            Fault::LocalDropout => {
                let layout = x.layout().clone();
                let local = drop_out(SpTensor::replicated(x.into_local(), device));
                SpTensor::from_local(local.into_local(), layout, device)
            }
            Fault::Clipped if device.rank() > 0 => drop_out(x).tokenwise(|x| x.clamp_min(0.0)),
            _ => drop_out(x),
        };
        let mut layers = vec![("embedding".to_owned(), x.clone())];
        for (number, block) in self.blocks.iter().enumerate() {
            let heads = block.attend(x.clone(), fault, device);
            layers.push((format!("blocks.{number}.heads"), heads.clone()));
            x = x + row_linear(heads, &block.output, Placement::Replicate);
            layers.push((format!("blocks.{number}.attention"), x.clone()));
            x = block.rest(x, fault, device);
            x = match (fault, device.rank()) {
                (Fault::ScaledOnOneRank, 1) => x.tokenwise(|x| x * 1.001),
                (Fault::NotANumber, 1) => x.tokenwise(|x| {
                    let large = x.clone().greater_elem(0.5);
                    x.mask_fill(large, f64::NAN)
                }),
                _ => x,
            };
            layers.push((format!("blocks.{number}"), x.clone()));
        }
        let x = x.tokenwise(|x| self.norm.forward(x));
        layers.push(("norm".to_owned(), x.clone()));
        (x, layers)
    }
}

fn drop_out(x: SpTensor<3>) -> SpTensor<3> {
    let key = DropoutKey {
        seed: 1,
        step: 2,
        layer: 3,
    };
    Dropout { probability: 0.2 }.forward(x, Some(key))
}

impl Block {
    fn attend(&self, x: SpTensor<3>, fault: Fault, device: &SpDevice) -> SpTensor<3> {
        let x = Gathered::new(x.tokenwise(|x| self.norm1.forward(x)));
        let project = |layer: &Linear, heads: usize| {
            let features = Features::sharded(heads, HEAD);
            features.split_units(x.linear(layer, features))
        };
        let (q, k, v) = (
            project(&self.query, HEADS),
            project(&self.key, KV_HEADS),
            project(&self.value, KV_HEADS),
        );
        let many = device.mesh().world().size() > 1;
        let y = match fault {
            Fault::LocalAttention => q.tokenwise(|q| {
                let [_, tokens, ..] = q.dims();
                causal(q, repeat(k.into_local()), repeat(v.into_local()), 0..tokens)
            }),
            Fault::LocalMask => {
                let gather = |x: SpTensor<4>| {
                    let ring = x.redistribute(Axis::Ulysses, Placement::Replicate);
                    ring.redistribute(Axis::Ring, Placement::Replicate).into_local()
                };
                let (k, v) = (gather(k), gather(v));
                q.tokenwise(|q| {
                    let [_, tokens, ..] = q.dims();
                    causal(q, repeat(k), repeat(v), 0..tokens)
                })
            }
            Fault::TiledHeads if many => {
                let tile = |x: SpTensor<4>| x.tokenwise(|x| Tensor::cat(vec![x.clone(), x], 2));
                attention(q, tile(k), tile(v), &AttentionOptions::default())
            }
            Fault::WrongMerge if many => {
                // Queries of 0 weigh all keys alike.
                let even = q.clone().tokenwise(|q| q.mul_scalar(0.0));
                let options = AttentionOptions::default();
                let parts = attention(q, k.clone(), v.clone(), &options) + attention(even, k, v, &options);
                parts.tokenwise(|x| x.mul_scalar(0.5))
            }
            _ => attention(q, k, v, &AttentionOptions::default()),
        };
        Features::sharded(HEADS, HEAD).merge_units(y)
    }

    fn rest(&self, x: SpTensor<3>, fault: Fault, device: &SpDevice) -> SpTensor<3> {
        let normed = Gathered::new(x.clone().tokenwise(|x| self.norm2.forward(x)));
        let hidden = normed.linear(&self.up, Features::sharded(FFN, 1));
        let hidden = match fault {
            Fault::OtherActivation if device.rank() > 0 => hidden.tokenwise(relu),
            _ => hidden.tokenwise(gelu),
        };
        let branch = match fault {
            Fault::BiasOnEveryRank => {
                let term = self.down.forward(hidden.into_local());
                SpTensor::from_local(term, x.layout().clone().partial(Axis::Tp), device)
                    .redistribute(Axis::Tp, Placement::Replicate)
            }
            Fault::ProductNotSummed => {
                let hidden = hidden.into_local();
                let bias = self.down.bias.as_ref().map(|bias| bias.val());
                let term = burn::tensor::module::linear(hidden, self.down.weight.val(), bias);
                SpTensor::from_local(term, x.layout().clone(), device)
            }
            _ => row_linear(hidden, &self.down, Placement::Replicate),
        };
        x + branch
    }
}

/// a, b as a, a, b, b.
fn repeat(x: Tensor<4>) -> Tensor<4> {
    let [batch, tokens, heads, width] = x.dims();
    let x = x
        .reshape([batch, tokens, heads, 1, width])
        .repeat_dim(3, HEADS / KV_HEADS);
    x.reshape([batch, tokens, HEADS, width])
}

/// Attention by hand, of queries at these positions to all keys up to theirs.
fn causal(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, positions: std::ops::Range<usize>) -> Tensor<4> {
    let [_, keys, ..] = k.dims();
    let [q, k, v] = [q, k, v].map(|x| x.swap_dims(1, 2));
    let hidden: Vec<bool> = positions
        .clone()
        .flat_map(|query| (0..keys).map(move |key| key > query))
        .collect();
    let mask = Tensor::<4, Bool>::from_data(TensorData::new(hidden, [1, 1, positions.len(), keys]), &q.device());
    let scores = q.matmul(k.transpose()).div_scalar((HEAD as f64).sqrt());
    let [batch, heads, queries, _] = scores.dims();
    let scores = scores.mask_fill(mask.expand([batch, heads, queries, keys]), f64::NEG_INFINITY);
    softmax(scores, 3).matmul(v).swap_dims(1, 2)
}

/// Every parameter's elements changed.
pub fn other(param: Param<Tensor<2>>) -> Param<Tensor<2>> {
    param.map(|tensor| tensor.detach().mul_scalar(1.5).detach().require_grad())
}

/// The same gradients times a factor.
pub fn scaled<M: Module>(module: &M, grads: &GradientsParams, factor: f64) -> GradientsParams {
    struct Scale<'a>(&'a GradientsParams, f64, GradientsParams);

    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.0.get::<D>(param.id) {
                self.2.register(param.id, grad.mul_scalar(self.1));
            }
        }
    }

    let mut scale = Scale(grads, factor, GradientsParams::new());
    module.visit(&mut scale);
    scale.2
}
