//! Two models, each with its step and one fault.

use burn::tensor::{Device, Int, TensorData};
use burn_sp::SpTensor;
use burn_sp::attention::{AttentionOptions, Positions, RotaryStyle};
use burn_sp::layout::{Axis, MeshShape, Placement};
use burn_sp::nn::{Dropout, Features, Gathered, Rotary, parallel_embedding};
use burn_sp_models::transformer::{BlockContext, Norm, Transformer, TransformerConfig};
use burn_sp_tests::{Comparison, Difference, Outcome, Report};

use super::fault::Fault;
use super::plain::{HIDDEN, Layers, Plain, VOCABULARY, other, plain};
use super::step::{batch, finish};
use crate::common::noise;

/// 12 tokens, so that the slices of the wrong layouts have the lengths of the right ones; 3 samples, which 2 ranks share unevenly.
fn tokens() -> TensorData {
    let ids: Vec<i64> = noise(9, 36)
        .iter()
        .map(|x| ((x + 1.0) * 1e5) as i64 % VOCABULARY as i64)
        .collect();
    TensorData::new(ids, [3, 12])
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Model {
    Plain,
    Llama,
}

/// Checks the model with a fault on a mesh.
pub fn check(model: Model, mesh: MeshShape, fault: Fault) -> Result<Report, Difference> {
    match model {
        Model::Plain => check_plain(mesh, fault),
        Model::Llama => check_llama(mesh, fault),
    }
}

fn check_plain(mesh: MeshShape, fault: Fault) -> Result<Report, Difference> {
    let model = burn_sp::seeded(&Device::flex(), 5, plain);
    Comparison::new(model)
        .shard_by(move |model: Plain, device| {
            let (mut model, layouts) = model.shard(device);
            if fault == Fault::OtherHead && device.rank() == 1 {
                model.head.weight = other(model.head.weight);
            }
            (model, layouts)
        })
        .input("tokens", tokens())
        .on([mesh])
        .run(|rank, model| {
            let (tokens, labels) = batch(rank, fault);
            let (hidden, layers) = model.forward(tokens, fault, rank.device());
            let logits = hidden.tokenwise(|x| model.head.forward(x));
            let norm = [model.norm.gamma.id, model.norm.beta.as_ref().expect("a bias").id];
            let outcome = finish(rank, model, &norm, logits, &labels, fault);
            recorded(outcome, layers)
        })
}

fn check_llama(mesh: MeshShape, fault: Fault) -> Result<Report, Difference> {
    let mut config = TransformerConfig::llama(VOCABULARY, HIDDEN, 2, 4, 24);
    (config.kv_heads, config.init_std) = (2, 0.2);
    let model = burn_sp::seeded(&Device::flex(), 5, |device| config.init(device));
    Comparison::new(model)
        .shard_by(Transformer::shard)
        .input("tokens", tokens())
        .on([mesh])
        .run(|rank, model| {
            let (tokens, labels) = batch(rank, fault);
            let (hidden, layers) = forward_llama(model, tokens, fault);
            let vocabulary = Features::sharded(VOCABULARY, 1);
            let weight = model.head.as_ref().expect("an output layer").weight.val();
            let logits = Gathered::new(hidden).linear_with(weight, None, vocabulary);
            let logits = logits.redistribute(Axis::Tp, Placement::Replicate);
            let Norm::Rms(norm) = &model.norm else {
                unreachable!("Llama's norm")
            };
            let outcome = finish(rank, model, &[norm.gamma.id], logits, &labels, fault);
            recorded(outcome, layers)
        })
}

/// The model's own forward pass, layer by layer.
fn forward_llama(model: &Transformer, tokens: SpTensor<2, Int>, fault: Fault) -> (SpTensor<3>, Layers) {
    let positions = match fault {
        Fault::LocalPositions => Positions::whole(tokens.local().dims()[1]),
        _ => tokens.positions(1),
    };
    let vocabulary = Features::sharded(VOCABULARY, 1);
    let mut x = parallel_embedding(&model.embedding, tokens, vocabulary, Placement::Shard(1));
    let rotary = Rotary {
        head_dim: 4,
        theta: model.rotary_theta.expect("rotary positions"),
        style: RotaryStyle::Halves,
        scaling: model.rotary_scaling,
    };
    let context = BlockContext {
        rotary: Some(rotary.table(&positions, x.local().dtype(), &x.local().device())),
        attention: AttentionOptions::default(),
        dropout: Dropout { probability: 0.0 },
        key: None,
    };
    let mut layers = vec![("embedding".to_owned(), x.clone())];
    for (number, block) in model.blocks.iter().enumerate() {
        x = block.forward(x, &context);
        layers.push((format!("blocks.{number}"), x.clone()));
    }
    let x = x.tokenwise(|x| model.norm.forward(x));
    layers.push(("norm".to_owned(), x.clone()));
    (x, layers)
}

fn recorded(outcome: Outcome, layers: Layers) -> Outcome {
    layers
        .iter()
        .fold(outcome, |outcome, (name, layer)| outcome.output(name, layer))
}
