use burn::module::{Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use burn_sp::attention::{AttentionOptions, Mask, attention};
use burn_sp::kernels::swiglu;
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::nn::{Dropout, Features, Gathered, row_linear, shard_columns, shard_rows};
use burn_sp::train::{LossShare, ParamLayouts, sum_gradients};
use burn_sp::{SpDevice, SpTensor};
use burn_sp_models::transformer::{BlockContext, TransformerConfig};
use burn_sp_tests::cast;

use crate::common::{f64s, noise, ranks, tensor};

fn weight(device: &SpDevice, shape: [usize; 2], seed: u64) -> Linear {
    let values = noise(seed, shape[0] * shape[1]);
    Linear {
        weight: Param::initialized(
            ParamId::from(seed),
            tensor(&values, shape, DType::F64, device.device()).require_grad(),
        ),
        bias: None,
    }
}

/// `[1, tokens, 4]`, tokens sharded over tp; and the leaf that it was cut from.
fn input(device: &SpDevice, tokens: usize) -> (SpTensor<3>, Tensor<3>) {
    let leaf = tensor(&noise(1, tokens * 4), [1, tokens, 4], DType::F64, device.device()).require_grad();
    let x = SpTensor::replicated(leaf.clone(), device).redistribute(Axis::Tp, Placement::Shard(1));
    (x, leaf)
}

fn near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-13, "{what}: {found}, expected {expected}");
    }
}

/// This rank's layers of a SwiGLU MLP.
struct Layers {
    units: Features,
    gate: Linear,
    up: Linear,
    down: Linear,
    layouts: ParamLayouts,
}

impl Layers {
    fn new(device: &SpDevice, units: usize) -> Self {
        let features = Features::sharded(units, 1);
        let mut layouts = ParamLayouts::replicated();
        let mut columns = |seed| shard_columns(weight(device, [4, units], seed), features, device, &mut layouts);
        let (gate, up) = (columns(2), columns(3));
        Self {
            units: features,
            gate,
            up,
            down: shard_rows(weight(device, [units, 4], 4), features, device, &mut layouts),
            layouts,
        }
    }

    fn forward(&self, x: SpTensor<3>) -> SpTensor<3> {
        let hidden = {
            let x = Gathered::new(x);
            let up = x.linear(&self.up, self.units).into_local();
            x.linear(&self.gate, self.units).tokenwise(|gate| swiglu(gate, up))
        };
        row_linear(hidden, &self.down, Placement::Shard(1))
    }

    /// The same from `redistribute` and `matmul` alone, on several ranks.
    fn unfused(&self, x: SpTensor<3>, device: &SpDevice) -> SpTensor<3> {
        let weight = |layer: &Linear, dim: usize| {
            let whole = self.layouts.layout(layer.weight.id).expect("it is sharded").shape();
            let layout = Layout::replicated([1, whole[0], whole[1]]).shard(dim, Axis::Tp, Split::Contiguous);
            SpTensor::from_local(layer.weight.val().unsqueeze::<3>(), layout, device)
        };
        let x = x.redistribute(Axis::Tp, Placement::Replicate);
        let up = x.clone().matmul(weight(&self.up, 2)).into_local();
        let hidden = x.matmul(weight(&self.gate, 2)).tokenwise(|gate| swiglu(gate, up));
        hidden
            .matmul(weight(&self.down, 1))
            .redistribute(Axis::Tp, Placement::Shard(1))
    }

    /// What a rank has of the output and of the weights' gradients, and its term of the input's gradient.
    fn results(&self, y: SpTensor<3>, leaf: &Tensor<3>) -> (SpTensor<3>, Vec<Tensor<2>>, Tensor<3>) {
        let grads = LossShare::new(y.clone().mul(y.clone()), 10).backward();
        let of = |layer: &Linear| layer.weight.grad(&grads).expect("a gradient");
        let weights = [&self.gate, &self.up, &self.down].map(of).to_vec();
        (y, weights, leaf.grad(&grads).expect("a gradient"))
    }
}

#[test]
fn fused_layers_are_the_table_of_layout_changes() {
    for mesh in [2, 3, 4, 8].map(MeshShape::tp) {
        for tokens in [9, 16] {
            ranks(mesh, |device| {
                let layers = Layers::new(&device, 9);
                let (x, leaf) = input(&device, tokens);
                let (y, weights, input_grad) = layers.results(layers.forward(x), &leaf);
                let (x, leaf) = input(&device, tokens);
                let (expected, expected_weights, expected_grad) = layers.results(layers.unfused(x, &device), &leaf);
                let context = |what: &str| format!("{tokens} tokens on {mesh}: {what}");
                near(&f64s(y.local()), &f64s(expected.local()), &context("output"));
                near(
                    &f64s(&input_grad),
                    &f64s(&expected_grad),
                    &context("gradient of the input"),
                );
                for (found, expected) in weights.iter().zip(&expected_weights) {
                    near(&f64s(found), &f64s(expected), &context("gradient of a weight"));
                }
            });
        }
    }
}

/// Fewer hidden units than ranks, fewer tokens than ranks, no token at all: gathered, everything is as on one rank.
#[test]
fn ranks_without_units_or_tokens() {
    let run = |mesh: MeshShape, units: usize, tokens: usize| {
        ranks(mesh, |device| {
            let layers = Layers::new(&device, units);
            let (x, leaf) = input(&device, tokens);
            let (y, weights, input_grad) = layers.results(layers.forward(x), &leaf);
            let terms = Layout::replicated([1, tokens, 4]).partial(Axis::Tp);
            let mut found = vec![
                f64s(&y.gather().into_local()),
                f64s(&SpTensor::from_local(input_grad, terms, &device).gather().into_local()),
            ];
            for (layer, grad) in [&layers.gate, &layers.up, &layers.down].into_iter().zip(weights) {
                let whole = match layers.layouts.layout(layer.weight.id) {
                    Some(layout) => SpTensor::from_local(grad, layout.clone(), &device)
                        .gather()
                        .into_local(),
                    None => grad,
                };
                found.push(f64s(&whole));
            }
            found
        })
    };
    for (units, tokens) in [(5, 7), (3, 2), (1, 1), (5, 0)] {
        let expected = run(MeshShape::default(), units, tokens).remove(0);
        for mesh in [2, 3, 4, 8].map(MeshShape::tp) {
            for found in run(mesh, units, tokens) {
                for (found, expected) in found.iter().zip(&expected) {
                    near(found, expected, &format!("{units} units, {tokens} tokens on {mesh}"));
                }
            }
        }
    }
}

/// One layer of a model: 2 all-gathers and 2 reduce-scatters forward, 4 and 2 backward, of (P-1)/P of the tokens each.
#[test]
fn traffic_of_a_layer_is_megatrons() {
    let (tokens, hidden) = (24, 16);
    for mesh in [
        MeshShape::tp(2),
        MeshShape::tp(4),
        MeshShape::tp(8),
        MeshShape {
            ulysses: 2,
            ..MeshShape::tp(2)
        },
    ] {
        let traffic = ranks(mesh, |device| {
            let config = TransformerConfig::gpt2(8, hidden, 1, 8, 64);
            let model = device.seeded(3, |device| config.init(device));
            let (model, _) = model.shard(&device);
            let block = &model.blocks[0];
            let layout = device.sequence_layout([1, tokens, hidden]);
            let x = Tensor::<3>::ones([1, tokens, hidden], device.device()).require_grad();
            let x = device
                .distribute(x, &layout)
                .redistribute(Axis::Tp, Placement::Shard(1));
            let world = device.mesh().world();
            let counts = || {
                let sent = world.statistics();
                let of = |op: &str| {
                    let found = sent.iter().find(|counter| counter.axis == "tp" && counter.op == op);
                    found.map_or((0, 0), |counter| (counter.calls, counter.bytes_sent))
                };
                world.reset_statistics();
                [of("all_gather"), of("reduce_scatter"), of("all_reduce")]
            };
            counts();
            let context = BlockContext {
                rotary: None,
                attention: AttentionOptions::default(),
                dropout: Dropout { probability: 0.0 },
                key: None,
            };
            let y = block.forward(x, &context);
            let forward = counts();
            let loss = LossShare::mean(y.clone().mul(y));
            counts();
            drop(loss.backward());
            [forward, counts()]
        });
        let share = |calls: u64| {
            let elements = tokens / mesh.ulysses * hidden * (mesh.tp - 1) / mesh.tp;
            (calls, calls * 4 * elements as u64)
        };
        for found in traffic {
            assert_eq!(found[0], [share(2), share(2), (0, 0)], "{mesh} forward");
            assert_eq!(found[1], [share(4), share(2), (0, 0)], "{mesh} backward");
        }
    }
}

/// Case 11: W = 0 and b = 1 give exactly 1 and, with an output gradient of 1 over 8 tokens, db = 8.
#[test]
fn the_bias_of_a_row_parallel_layer_counts_once() {
    for tokens in [Placement::Shard(1), Placement::Replicate] {
        for ranks_on_tp in [1, 2, 3, 4] {
            ranks(MeshShape::tp(ranks_on_tp), |device| {
                let units = Features::sharded(6, 1);
                let mut layouts = ParamLayouts::replicated();
                let mut layer = LinearConfig::new(6, 3).init(device.device());
                layer.weight = layer.weight.map(|weight| weight.zeros_like());
                layer.bias = layer.bias.map(|bias| bias.map(|bias| bias.ones_like().require_grad()));
                let layer = shard_rows(layer, units, &device, &mut layouts);
                let layout = units.on(Layout::replicated([1, 8, 6]), 2, device.mesh());
                let h = device.distribute(Tensor::<3>::ones([1, 8, 6], device.device()), &layout);
                let y = row_linear(h, &layer, tokens);
                assert!(f64s(y.local()).iter().all(|y| *y == 1.0), "{tokens} on {ranks_on_tp}");
                let loss = LossShare::new(y, 1);
                assert_eq!(loss.value(), 24.0);
                let grads = GradientsParams::from_grads(loss.backward(), &layer);
                let grads = sum_gradients(&layer, grads, &layouts, device.mesh());
                let id = layer.bias.as_ref().expect("a bias").id;
                assert_eq!(
                    f64s(&grads.get::<1>(id).expect("a gradient")),
                    [8.0; 3],
                    "{tokens} on {ranks_on_tp}"
                );
            });
        }
    }
}

/// Case 25: four query heads share two key/value heads on four ranks.
#[test]
fn each_rank_reads_the_key_value_head_of_its_query_head() {
    let found = ranks(MeshShape::tp(4), |device| {
        let zeros = |heads| Tensor::<4>::zeros([1, 3, heads, 2], device.device());
        let heads = Layout::replicated([1, 3, 4, 2]).shard(2, Axis::Tp, Split::Contiguous);
        let q = device.distribute(zeros(4), &heads);
        // Key/value head 0 is 5 all over, head 1 is 7.
        let v = tensor(
            &[5.0, 5.0, 7.0, 7.0].repeat(3),
            [1, 3, 2, 2],
            DType::F32,
            device.device(),
        );
        let leaf = v.require_grad();
        let options = AttentionOptions {
            mask: Mask::Full,
            ..AttentionOptions::default()
        };
        let k = SpTensor::replicated(zeros(2), &device);
        let y = attention(q, k, SpTensor::replicated(leaf.clone(), &device), &options);
        let grads = LossShare::new(y.clone(), 1).backward();
        (f64s(y.local()), f64s(&leaf.grad(&grads).expect("a gradient")))
    });
    for (rank, (y, _)) in found.iter().enumerate() {
        assert_eq!(*y, [if rank < 2 { 5.0 } else { 7.0 }; 6]);
    }
    // Each of two query heads gives every token of its value head 1 in all, spread over three keys.
    for element in 0..12 {
        let sum: f64 = found.iter().map(|(_, dv)| dv[element]).sum();
        assert!((sum - 2.0).abs() < 1e-6, "{sum}");
    }
}

/// What is frozen gets no gradient and costs no traffic; what is not gets the same.
#[test]
fn frozen_inputs_and_weights() {
    ranks(MeshShape::tp(3), |device| {
        let units = Features::sharded(5, 1);
        let run = |x_frozen: bool, frozen: [bool; 2]| {
            let mut layouts = ParamLayouts::replicated();
            let mut columns = |seed, frozen: bool| {
                let mut layer = shard_columns(weight(&device, [4, 5], seed), units, &device, &mut layouts);
                layer.weight = layer.weight.set_require_grad(!frozen);
                layer
            };
            let (gate, up) = (columns(2, frozen[0]), columns(3, frozen[1]));
            let (x, leaf) = input(&device, 7);
            let x = if x_frozen {
                let frozen = Tensor::from_inner(leaf.clone().inner());
                SpTensor::replicated(frozen, &device).redistribute(Axis::Tp, Placement::Shard(1))
            } else {
                x
            };
            let y = {
                let x = Gathered::new(x);
                let up = x.linear(&up, units).into_local();
                x.linear(&gate, units).tokenwise(|gate| swiglu(gate, up))
            };
            let world = device.mesh().world();
            world.reset_statistics();
            let loss = LossShare::new(y, 3).backward();
            let calls = world.statistics().iter().map(|counter| counter.calls).sum::<u64>();
            let grads = [&gate, &up].map(|layer| layer.weight.grad(&loss).map(|grad| f64s(&grad)));
            (grads, leaf.grad(&loss).map(|grad| f64s(&grad)), calls)
        };
        let ([gate, up], x, calls) = run(false, [false; 2]);
        assert_eq!(calls, 2, "the input gathered again, its gradient scattered");
        assert_eq!(run(true, [false; 2]), ([gate.clone(), up.clone()], None, 1));
        assert_eq!(run(false, [true, false]), ([None, up], x.clone(), 2));
        assert_eq!(run(false, [true, true]), ([None, None], x, 1));
        assert_eq!(run(true, [false, true]), ([gate, None], None, 1));
    });
}

/// A layer whose output is not used adds nothing, and takes nothing away.
#[test]
fn an_unused_layer_of_an_input() {
    ranks(MeshShape::tp(2), |device| {
        let units = Features::sharded(5, 1);
        let run = |also: bool| {
            let mut layouts = ParamLayouts::replicated();
            let mut columns = |seed| shard_columns(weight(&device, [4, 5], seed), units, &device, &mut layouts);
            let (used, unused) = (columns(2), columns(3));
            let (x, leaf) = input(&device, 7);
            let x = Gathered::new(x);
            let y = x.linear(&used, units);
            let _unused = also.then(|| x.linear(&unused, units));
            let loss = LossShare::new(y.clone().mul(y), 3).backward();
            [
                f64s(&used.weight.grad(&loss).expect("a gradient")),
                f64s(&leaf.grad(&loss).expect("a gradient")),
            ]
        };
        assert_eq!(run(true), run(false));
    });
}

/// Every rank begins with the same module; what it keeps are its slices, and together they are the module.
#[test]
fn a_sharded_model_is_the_whole_one() {
    for ranks_on_tp in [1, 2, 3, 4] {
        ranks(MeshShape::tp(ranks_on_tp), |device| {
            let mut config = TransformerConfig::llama(37, 24, 1, 6, 7);
            config.kv_heads = 3;
            config.bias = true;
            let whole = cast(device.seeded(3, |device| config.init(device)), DType::F64);
            let (part, layouts) = whole.clone().shard(&device);
            let parameter = |param: &Param<Tensor<2>>, whole: &Param<Tensor<2>>, dim: Option<usize>| {
                assert_eq!(param.id, whole.id);
                assert_eq!(param.is_require_grad(), whole.is_require_grad());
                let gathered = match layouts.layout(param.id) {
                    Some(layout) => {
                        assert_eq!(dim.map(Placement::Shard), Some(layout.placement(Axis::Tp)));
                        SpTensor::from_local(param.val().detach(), layout.clone(), &device)
                            .gather()
                            .into_local()
                    }
                    None => {
                        assert!(dim.is_none() || ranks_on_tp == 1);
                        param.val()
                    }
                };
                assert_eq!(f64s(&gathered), f64s(&whole.val()));
            };
            let (a, b) = (&part.blocks[0], &whole.blocks[0]);
            parameter(&a.attention.query.weight, &b.attention.query.weight, Some(1));
            // Three key/value heads for six query heads: apart on three ranks only.
            let kv = (ranks_on_tp == 3).then_some(1);
            parameter(&a.attention.key.weight, &b.attention.key.weight, kv);
            parameter(&a.attention.value.weight, &b.attention.value.weight, kv);
            parameter(&a.attention.output.weight, &b.attention.output.weight, Some(0));
            parameter(&a.mlp.down.weight, &b.mlp.down.weight, Some(0));
            parameter(&part.embedding.weight, &whole.embedding.weight, Some(0));
            let head = |model: &burn_sp_models::transformer::Transformer| model.head.clone().expect("untied").weight;
            parameter(&head(&part), &head(&whole), Some(1));
            let heads: Vec<usize> = (0..ranks_on_tp)
                .map(|rank| 6 / ranks_on_tp + usize::from(rank < 6 % ranks_on_tp))
                .collect();
            assert_eq!(a.attention.query.weight.dims()[1], 4 * heads[device.rank()]);
        });
    }
}
