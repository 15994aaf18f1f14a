//! Burn's own multi-head attention over tokens that ranks share out: what Burn computes, on every mesh.

mod common;

use burn::module::Module;
use burn::nn::EmbeddingConfig;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_sp::layout::MeshShape;
use burn_sp::nn::DropoutKey;
use burn_sp::prelude::*;
use burn_sp_tests::{Comparison, Outcome, cast};
use common::{contains, device, failure, mesh, noise, ranks};

/// 3 heads of 4 elements, which 2 and 4 ranks share unevenly.
fn module() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(12, 3).with_dropout(0.0)
}

fn meshes() -> [MeshShape; 6] {
    [
        mesh(1, 1, 2),
        mesh(1, 1, 4),
        mesh(1, 4, 1),
        mesh(1, 2, 2),
        mesh(2, 1, 2),
        MeshShape { tp: 2, ..mesh(1, 1, 2) },
    ]
}

/// `[2, 7, 12]`: no mesh divides 7 tokens.
fn input() -> TensorData {
    TensorData::new(noise(3, 2 * 7 * 12), [2, 7, 12])
}

/// Burn's own forward pass.
fn by_burn(module: &MultiHeadAttention, x: Tensor<3>) -> Tensor<3> {
    let mask = generate_autoregressive_mask(2, 7, &x.device());
    module.forward(MhaInput::self_attn(x).mask_attn(mask)).context
}

/// In f64, where the order of sums is next to nothing: outputs, and the gradients of the input and of all parameters.
#[test]
fn it_is_burns_own() {
    let module = cast(
        burn_sp::seeded(&device(), 5, |device| module().init(device)),
        DType::F64,
    );
    let (own, x) = (module.clone(), input());
    let report = Comparison::new(module)
        .input("x", x)
        .on(meshes())
        .run(move |rank, module| {
            let x = rank.input::<3>("x");
            let layout = rank.device().sequence_layout([2, 7, 12]);
            let sharded = rank.device().distribute(x.clone(), &layout);
            let y = multi_head_attention(module, sharded, &Mask::Causal.into());
            // Of constants: the graph is that of the sharded pass.
            let constant = own.clone().fork(&x.device());
            let burn = by_burn(&constant, x.detach()).detach();
            let difference = y.clone() - rank.device().distribute(burn, &layout);
            let worst = difference.local().clone().abs().max().into_scalar::<f64>();
            assert!(worst < 1e-12, "off by {worst}");
            Outcome::new(LossShare::mean(y.clone() * y.clone())).output("y", &y)
        });
    report.unwrap_or_else(|error| panic!("{error}"));
}

/// Weights are dropped by global positions, with the module's probability.
#[test]
fn dropout_is_the_same_on_every_mesh() {
    let out = |mesh, probability: f64, key| {
        let found = ranks(mesh, |device| {
            let module = device.seeded(5, |device| module().with_dropout(probability).init(device));
            let x = Tensor::<3>::from_data(input(), (device.device(), DType::F32));
            let x = device.distribute(x, &device.sequence_layout([2, 7, 12]));
            let options = AttentionOptions {
                dropout_key: key,
                ..Mask::Causal.into()
            };
            let y = multi_head_attention(&module, x, &options).gather().into_local();
            y.into_data().iter::<f64>().collect::<Vec<_>>()
        });
        found.into_iter().next().unwrap()
    };
    let key = Some(DropoutKey {
        seed: 1,
        step: 2,
        layer: 3,
    });
    let far = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0.0f64, |worst, (a, b)| worst.max((a - b).abs()));
    let one = out(mesh(1, 1, 1), 0.5, key);
    assert!(far(&one, &out(mesh(1, 1, 1), 0.0, None)) > 0.01);
    for mesh in meshes() {
        let off = far(&one, &out(mesh, 0.5, key));
        assert!(off < 1e-5, "{mesh}: off by {off}");
    }
}

#[test]
fn what_would_be_something_else_is_refused() {
    let said = |config: MultiHeadAttentionConfig| {
        failure(mesh(1, 1, 2), move |device| {
            let x = Tensor::<3>::zeros([2, 7, 12], device.device());
            let x = device.distribute(x, &device.sequence_layout([2, 7, 12]));
            multi_head_attention(&config.init(device.device()), x, &Mask::Causal.into());
        })
    };
    contains(
        &said(module().with_dropout(0.1)),
        &[
            "multi_head_attention",
            "probability 0.1",
            "dropout_key",
            "multi_head.rs",
        ],
    );
    contains(
        &said(module().with_quiet_softmax(true)),
        &["multi_head_attention", "quiet softmax", "make it without"],
    );
}

/// Case 24, and two tokens on four ranks: a rank without tokens gets an empty row, which Burn's embedding and attention take.
#[test]
fn positions_are_global_and_may_be_none() {
    let held = |mesh, length: usize| {
        ranks(mesh, move |device| {
            let embedding = device.seeded(1, |device| EmbeddingConfig::new(8, 12).init(device));
            let module = device.seeded(2, |device| module().init(device));
            let tokens = device.distribute_tokens(Tensor::<2, Int>::zeros([1, length], device.device()));
            let ids = tokens.position_ids(1);
            let x = tokens.tokenwise(|_| embedding.forward(ids.clone()));
            let y = multi_head_attention(&module, x, &Mask::Causal.into());
            assert_eq!(y.global_shape(), [1, length, 12]);
            ids.into_data().iter::<i64>().collect::<Vec<_>>()
        })
    };
    assert_eq!(held(mesh(1, 2, 1), 8), [[0, 1, 6, 7], [2, 3, 4, 5]]);
    assert_eq!(held(mesh(1, 1, 4), 2), [vec![0], vec![1], vec![], vec![]]);
}
