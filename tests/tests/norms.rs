//! Parameters that all ranks hold: their gradients, the norm they are clipped by, and that they stay equal bit for bit.

mod common;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Tensor};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::nn::{LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig};
use burn_sp::train::{LossShare, ParamLayouts, clip_by_global_norm, sum_gradients};
use burn_sp::{SpDevice, SpTensor};
use burn_sp_tests::{gradients_by_path, parameters_by_path};
use common::{f64s, mesh, noise, ranks, sequence};

fn meshes() -> Vec<MeshShape> {
    vec![
        mesh(1, 1, 1),
        mesh(1, 1, 2),
        mesh(1, 2, 1),
        mesh(1, 1, 4),
        mesh(1, 2, 2),
        mesh(2, 1, 2),
        MeshShape { tp: 2, ..mesh(1, 1, 2) },
    ]
}

#[derive(Module, Debug)]
struct Norms {
    layer: LayerNorm,
    rms: RmsNorm,
    burn: burn::nn::LayerNorm,
}

impl Norms {
    fn new(device: &SpDevice) -> Self {
        Self {
            layer: LayerNormConfig::new(2).init(device.device()),
            rms: RmsNormConfig::new(2).init(device.device()),
            burn: burn::nn::LayerNormConfig::new(2).init(device.device()),
        }
    }
}

/// Case 10: x_t = (t+1)(1,-1), dout_t = t+1. All three norms make (1,-1) of every row.
#[test]
fn norm_weights_get_the_gradient_of_all_tokens() {
    for mesh in meshes() {
        for split in [Split::Contiguous, Split::Zigzag] {
            let found = ranks(mesh, |device| {
                let norms = Norms::new(&device);
                let layout = sequence([2, 4, 2], split.clone());
                let number: Vec<f64> = (0..16).map(|i| f64::from(i / 2 + 1)).collect();
                let rows: Vec<f64> = (0..16)
                    .map(|i| f64::from(i / 2 + 1) * f64::from(1 - 2 * (i % 2)))
                    .collect();
                let whole = |values| common::tensor(values, [2, 4, 2], DType::F32, device.device());
                let x = device.distribute(whole(&rows), &layout);
                let dout = device.distribute(whole(&number), &layout);
                let out = |y: SpTensor<3>| LossShare::new(y.mul(dout.clone()), 1);
                let loss = out(x.clone().tokenwise(|x| norms.layer.forward(x)))
                    .add(out(x.clone().tokenwise(|x| norms.rms.forward(x))))
                    .add(out(x.tokenwise(|x| norms.burn.forward(x))));
                let grads = GradientsParams::from_grads(loss.backward(), &norms);
                let grads = sum_gradients(&norms, grads, &ParamLayouts::replicated(), device.mesh());
                gradients_by_path(&norms, &grads)
            });
            // The variance of (t+1)(1,-1) is (t+1)^2; eps stands beside it.
            let eps = 1e-5;
            let sum: f64 = (1..=8)
                .map(|n| f64::from(n * n) / (f64::from(n * n) + eps).sqrt())
                .sum();
            for (rank, grads) in found.iter().enumerate() {
                for path in ["layer.gamma", "rms.gamma", "burn.gamma"] {
                    let found = &grads[path].elements;
                    let off = (found[0] - sum).abs().max((found[1] + sum).abs());
                    assert!(
                        off <= 8.0 * 36.0 * f64::from(f32::EPSILON),
                        "{mesh}, rank {rank}, {path}: {found:?}, not {sum}"
                    );
                }
                for path in ["layer.beta", "burn.beta"] {
                    assert_eq!(grads[path].elements, [36.0, 36.0], "{mesh}, rank {rank}, {path}");
                }
                assert!(
                    grads.iter().all(|(path, grad)| found[0][path].same_bits(grad)),
                    "{mesh}, rank {rank}"
                );
            }
        }
    }
}

/// Case 10: data that differ from rank to rank and step to step, AdamW, clipping.
#[test]
fn ranks_stay_equal_over_ten_steps() {
    for mesh in meshes() {
        let found = ranks(mesh, |device| {
            let mut norms = Norms::new(&device);
            let mut optimizer = AdamWConfig::new().init();
            let layout = sequence([2, 7, 2], Split::Zigzag);
            for step in 0..10 {
                let x = common::tensor(&noise(step, 28), [2, 7, 2], DType::F32, device.device());
                let x = device.distribute(x, &layout);
                let y = x.clone().tokenwise(|x| {
                    norms
                        .burn
                        .forward(norms.layer.forward(x.clone()) + norms.rms.forward(x))
                });
                let loss = LossShare::mean(y.mul(x));
                let grads = GradientsParams::from_grads(loss.backward(), &norms);
                let grads = sum_gradients(&norms, grads, &ParamLayouts::replicated(), device.mesh());
                let (grads, norm) =
                    clip_by_global_norm(&norms, grads, Some(0.01), &ParamLayouts::replicated(), device.mesh());
                assert!(norm > 0.01, "the step is clipped: {norm}");
                norms = optimizer.step(0.01, norms, grads);
            }
            parameters_by_path(&norms)
        });
        for (path, first) in &found[0] {
            assert!(first.elements.iter().all(|x| x.is_finite()));
            for (rank, other) in found.iter().enumerate() {
                assert!(first.same_bits(&other[path]), "{mesh}: {path} differs on rank {rank}");
            }
        }
    }
}

#[derive(Module, Debug)]
struct Two {
    replicated: Param<Tensor<1>>,
    sharded: Param<Tensor<1>>,
}

/// Case 12: replicated (3,4) on four ranks and one sharded entry 12.
#[test]
fn the_global_norm_counts_each_parameter_once() {
    for axis in [Axis::Ulysses, Axis::Tp] {
        let mesh = if axis == Axis::Tp {
            MeshShape::tp(4)
        } else {
            MeshShape::ulysses(4)
        };
        for (max_norm, factor) in [(None, 1.0), (Some(13.0), 1.0), (Some(6.5), 0.5), (Some(3.25), 0.25)] {
            let found = ranks(mesh, |device| {
                let ones = |length: usize| Param::from_tensor(Tensor::<1>::ones([length], device.device()));
                let module = Two {
                    replicated: ones(2),
                    sharded: ones(1),
                };
                let layouts = ParamLayouts::replicated().with(
                    module.sharded.id,
                    Layout::replicated([4]).shard(0, axis, Split::Contiguous),
                );
                let plain = device.device().clone().inner();
                let mut grads = GradientsParams::new();
                // Replicated gradients are summed first: each rank brings a quarter.
                grads.register(module.replicated.id, Tensor::<1>::from_floats([0.75, 1.0], &plain));
                let own = if device.rank() == 2 { 12.0 } else { 0.0 };
                grads.register(module.sharded.id, Tensor::<1>::from_floats([own], &plain));
                let grads = sum_gradients(&module, grads, &layouts, device.mesh());
                let (grads, norm) = clip_by_global_norm(&module, grads, max_norm, &layouts, device.mesh());
                let get = |id| f64s(&grads.get::<1>(id).expect("a gradient"));
                (norm, get(module.replicated.id), get(module.sharded.id))
            });
            for (rank, (norm, replicated, sharded)) in found.into_iter().enumerate() {
                assert_eq!(norm, 13.0, "{mesh}: what is logged is the norm before clipping");
                assert_eq!(replicated, [3.0 * factor, 4.0 * factor], "{mesh}, rank {rank}");
                assert_eq!(
                    sharded,
                    [if rank == 2 { 12.0 * factor } else { 0.0 }],
                    "{mesh}, rank {rank}"
                );
            }
        }
    }
}

#[derive(Module, Debug)]
struct Large {
    w: Param<Tensor<1>>,
}

/// Design section 4: above 4 million elements Burn's own f32 sum depends on work stealing.
#[test]
fn five_million_elements_stay_equal() {
    const ELEMENTS: usize = 5_000_000;
    for size in [2, 4] {
        let found = ranks(MeshShape::ulysses(size), |device| {
            let mut module = Large {
                w: Param::from_tensor(Tensor::<1>::zeros([ELEMENTS], device.device())),
            };
            let mut optimizer = AdamWConfig::new().init();
            let mut norms = Vec::new();
            let x: Vec<f32> = noise(1 + device.rank() as u64, ELEMENTS)
                .into_iter()
                .map(|x| x as f32)
                .collect();
            let x = Tensor::<1>::from_floats(x.as_slice(), device.device());
            for step in 0..3 {
                let terms = (module.w.val() * 0.5 + 1.0 + f64::from(step)) * x.clone() * module.w.val();
                let layout =
                    burn_sp::layout::Layout::replicated([size * ELEMENTS]).shard(0, Axis::Ulysses, Split::Contiguous);
                let loss = LossShare::new(SpTensor::from_local(terms, layout, &device), 1);
                let grads = GradientsParams::from_grads(loss.backward(), &module);
                let grads = sum_gradients(&module, grads, &ParamLayouts::replicated(), device.mesh());
                let (grads, norm) =
                    clip_by_global_norm(&module, grads, Some(1.0), &ParamLayouts::replicated(), device.mesh());
                assert!(norm > 1.0, "the step is clipped: {norm}");
                norms.push(norm.to_bits());
                module = optimizer.step(0.01, module, grads);
            }
            (norms, module.w.val().into_data())
        });
        let moved = found[0].1.iter::<f32>().filter(|w| w.abs() > 1e-3).count();
        assert!(moved > ELEMENTS / 2, "{moved} elements have moved");
        for (norms, w) in &found {
            assert_eq!(*norms, found[0].0, "{size} ranks clip by the same bits");
            assert!(w.as_bytes() == found[0].1.as_bytes(), "{size} ranks hold the same bits");
        }
    }
}
