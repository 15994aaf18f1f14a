//! Parts that run again in backward: the same outputs and gradients, to the bit, and less that is kept.

mod common;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation::gelu};
use burn_sp::layout::{Axis, MeshShape, Split};
use burn_sp::nn::{Dropout, DropoutKey};
use burn_sp::train::{Keep, checkpoint, checkpoint_with};
use burn_sp::{SpTensor, seeded};
use common::{f64s, noise, ranks, tensor};

/// With and without Burn's own gradient checkpointing.
fn devices() -> [Device; 2] {
    let device = common::device();
    [device.clone().autodiff(), device.autodiff().gradient_checkpointing()]
}

#[derive(Module, Debug)]
struct Part {
    up: Linear,
    down: Linear,
}

impl Part {
    fn new(device: &Device) -> Self {
        seeded(device, 3, |device| Part {
            up: LinearConfig::new(4, 8).init(device),
            down: LinearConfig::new(8, 4).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }
}

fn input(device: &Device) -> Tensor<2> {
    tensor(&noise(5, 12), [3, 4], burn::tensor::DType::F32, device)
}

/// Output and the gradients of x and the four parameters, none where there is none.
fn run(part: &Part, x: Tensor<2>, forward: impl Fn(&Part, Tensor<2>) -> Tensor<2>) -> Vec<Option<Vec<f64>>> {
    let y = forward(part, x.clone());
    let weights = tensor(&noise(9, 12), [3, 4], burn::tensor::DType::F32, &x.device());
    let out = Some(f64s(&y));
    // Used twice, so that a parameter's gradient comes from two places.
    let y = forward(part, y);
    let grads = (y * weights).sum().backward();
    let of = |linear: &Linear| {
        let bias = linear.bias.as_ref().expect("a bias").val();
        [
            linear.weight.val().grad(&grads).map(|grad| f64s(&grad)),
            bias.grad(&grads).map(|grad| f64s(&grad)),
        ]
    };
    let [a, b] = of(&part.up);
    let [c, d] = of(&part.down);
    vec![out, x.grad(&grads).map(|grad| f64s(&grad)), a, b, c, d]
}

#[test]
fn gradients_are_those_of_the_plain_run() {
    for device in devices() {
        let part = Part::new(&device);
        let frozen = |part: Part| Part {
            up: part.up.no_grad(),
            ..part
        };
        let again = |part: &Part, x| checkpoint(part, x, |part: &Part, x| part.forward(x));
        for (name, part, x) in [
            ("all tracked", part.clone(), input(&device).require_grad()),
            ("an input without gradient", part.clone(), input(&device)),
            ("a frozen layer", frozen(part.clone()), input(&device).require_grad()),
            ("only the input", part.clone().no_grad(), input(&device).require_grad()),
        ] {
            let plain = run(&part, x.clone(), Part::forward);
            assert_eq!(run(&part, x, again), plain, "{name}");
        }
    }
}

/// Parameters that are computed from others: gradients go on to those.
#[test]
fn parameters_may_be_computed() {
    struct Twice;

    impl ModuleMapper for Twice {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor * 2.0)
        }
    }

    for device in devices() {
        let part = Part::new(&device);
        for (name, x) in [("tracked", input(&device).require_grad()), ("plain", input(&device))] {
            let plain = run(&part, x.clone(), |part, x| part.clone().map(&mut Twice).forward(x));
            let again = |part: &Part, x| {
                let computed = part.clone().map(&mut Twice);
                checkpoint(&computed, x, |part: &Part, x| part.forward(x))
            };
            assert_eq!(run(&part, x.clone(), again), plain, "{name}");
            // Of which one layer is not used: its gradient is zero, not none.
            let half = |part: &Part, x| {
                let computed = part.clone().map(&mut Twice);
                checkpoint(&computed, x, |part: &Part, x: Tensor<2>| {
                    x.clone() * part.down.forward(part.up.forward(x).detach())
                })
            };
            let found = run(&part, x, half);
            assert_eq!(found[2].as_deref(), Some(&[0.0; 32][..]), "{name}");
        }
    }
}

#[test]
#[should_panic(expected = "25 tensors, inputs and parameters that are themselves computed; at most 24")]
fn more_computed_parameters_than_a_node_takes_are_refused() {
    let device = common::device().autodiff();
    let computed = |_| {
        let weight = input(&device).require_grad() * 2.0;
        Param::initialized(burn::module::ParamId::new(), weight)
    };
    let parts: Vec<Param<Tensor<2>>> = (0..24).map(computed).collect();
    checkpoint(&parts, input(&device), |parts: &Vec<Param<Tensor<2>>>, x: Tensor<2>| {
        x * parts[0].val()
    });
}

#[test]
fn inputs_may_wait_in_host_memory() {
    for device in devices() {
        let part = Part::new(&device);
        let plain = run(&part, input(&device).require_grad(), Part::forward);
        let again = |part: &Part, x| checkpoint_with(Keep::Host, part, x, |part: &Part, x| part.forward(x));
        assert_eq!(run(&part, input(&device).require_grad(), again), plain);
    }
}

#[test]
fn a_plain_device_keeps_nothing_anyway() {
    let device = common::device();
    let part = Part::new(&device);
    let y = checkpoint(&part, input(&device), |part: &Part, x| part.forward(x));
    assert_eq!(f64s(&y), f64s(&part.forward(input(&device))));
}

#[test]
fn several_inputs_and_parts_in_parts() {
    for device in devices() {
        let part = Part::new(&device);
        let (a, b) = (
            input(&device).require_grad(),
            input(&device).mul_scalar(0.5).require_grad(),
        );
        let c = input(&device);
        let both = |part: &Part, (a, b, c): (Tensor<2>, Tensor<2>, Tensor<2>)| part.forward(a * c) * b;
        let grads = |y: Tensor<2>| {
            let grads = y.sum().backward();
            [&a, &b, &part.up.weight.val()].map(|x| f64s(&x.grad(&grads).expect("a gradient")))
        };
        let plain = grads(both(&part, (a.clone(), b.clone(), c.clone())));
        let once = checkpoint(&part, (a.clone(), b.clone(), c.clone()), both);
        assert_eq!(grads(once), plain);
        let nested = checkpoint(
            &part,
            (a.clone(), b.clone(), c.clone()),
            move |part: &Part, (a, b, c)| {
                let inner = checkpoint(part, (a, c), |part: &Part, (a, c): (Tensor<2>, Tensor<2>)| {
                    part.forward(a * c)
                });
                inner * b
            },
        );
        assert_eq!(grads(nested), plain);
    }
}

#[test]
fn an_input_that_is_not_used_has_gradient_zero() {
    let device = common::device().autodiff();
    let (part, x) = (Part::new(&device), input(&device).require_grad());
    let other = input(&device).require_grad();
    let y = checkpoint(
        &part,
        (x.clone() + 1.0, other.clone() * 2.0),
        |part: &Part, (x, _): (Tensor<2>, Tensor<2>)| part.forward(x),
    );
    let grads = y.sum().backward();
    assert!(x.grad(&grads).is_some());
    assert_eq!(f64s(&other.grad(&grads).expect("zeros")), [0.0; 12]);
}

#[test]
#[should_panic(expected = "give them as a part of the input")]
fn a_tracked_tensor_from_outside_is_refused() {
    let device = common::device().autodiff();
    let (part, x) = (Part::new(&device), input(&device).require_grad());
    let outside = input(&device).require_grad() * 2.0;
    checkpoint(&part, x, move |part: &Part, x: Tensor<2>| {
        part.forward(x) * outside.clone()
    });
}

/// Collectives repeat on all ranks, dropout draws the same mask, layouts stay.
#[test]
fn layouts_dropout_and_collectives() {
    for mesh in [MeshShape::default(), MeshShape::ulysses(3), MeshShape::tp(2)] {
        let axis = if mesh.tp > 1 { Axis::Tp } else { Axis::Ulysses };
        ranks(mesh, |device| {
            let whole = tensor(&noise(5, 28), [7, 4], burn::tensor::DType::F32, device.device()).require_grad();
            let part = device.seeded(3, |device| LinearConfig::new(4, 4).init(device));
            let key = DropoutKey {
                seed: 1,
                step: 2,
                layer: 3,
            };
            let forward = move |part: &Linear, x: SpTensor<2>| {
                let x = x.tokenwise(|x| part.forward(x)).shard(axis, 1, Split::Contiguous);
                let x = Dropout { probability: 0.4 }.forward(x, Some(key));
                x.shard(axis, 0, Split::Contiguous).tokenwise(|x| x.clone() * x)
            };
            let layout = burn_sp::layout::Layout::replicated([7, 4]).shard(0, axis, Split::Contiguous);
            let run = |checkpointed: bool| {
                device.mesh().world().reset_statistics();
                let x = device.distribute(whole.clone(), &layout);
                let y = match checkpointed {
                    true => checkpoint(&part, x, forward),
                    false => forward(&part, x),
                };
                assert_eq!(*y.layout(), layout);
                let out = f64s(y.local());
                let grads = y.into_local().sum().backward();
                let calls: u64 = device
                    .mesh()
                    .world()
                    .statistics()
                    .iter()
                    .map(|counter| counter.calls)
                    .sum();
                let grads = [
                    f64s(&whole.grad(&grads).unwrap()),
                    f64s(&part.weight.val().grad(&grads).unwrap()),
                ];
                (out, grads, calls)
            };
            let (plain, again) = (run(false), run(true));
            assert_eq!((&again.0, &again.1), (&plain.0, &plain.1));
            // Two more all-to-alls, for the second forward pass.
            let extra = if mesh.ranks() > 1 { 2 } else { 0 };
            assert_eq!(again.2, plain.2 + extra);
        });
    }
}
