//! The harness finds what is wrong, and says which, where and by how much.

mod common;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::layout::{Axis, Placement};
use burn_sp::train::LossShare;
use burn_sp_tests::{Comparison, Difference, Outcome, Rank, cast, dtype_of};
use common::{contains, mesh, noise};

#[derive(Module, Debug)]
struct Model {
    weight: Param<Tensor<1>>,
    shift: Param<Tensor<1>>,
    frozen: Param<Tensor<1>>,
}

fn model() -> Model {
    let param = |seed| {
        Param::from_data(
            TensorData::new(noise(seed, 3), [3]).convert_dtype(DType::F32),
            &Device::flex(),
        )
    };
    Model {
        weight: param(1),
        shift: param(2),
        frozen: param(3).set_require_grad(false),
    }
}

/// Runs a forward pass whose loss is up to `loss`, given the rank and the output.
fn compare(
    forward: impl Fn(&Rank, Tensor<3>, &Model) -> Tensor<3> + Send + Sync,
    loss: impl Fn(&Rank, burn_sp::SpTensor<3>) -> LossShare + Send + Sync,
) -> Result<burn_sp_tests::Report, Difference> {
    let x = TensorData::new(noise(4, 2 * 7 * 3), [2, 7, 3]).convert_dtype(DType::F32);
    Comparison::new(model())
        .input("x", x)
        .on([mesh(1, 1, 1), mesh(1, 2, 1), mesh(1, 1, 3), mesh(2, 1, 2)])
        .run(|rank, model| {
            let x = rank.input::<3>("x");
            let layout = rank.device().sequence_layout(x.dims());
            let y = rank
                .device()
                .distribute(x, &layout)
                .tokenwise(|x| forward(rank, x, model));
            Outcome::new(loss(rank, y.clone())).output("y", &y)
        })
}

fn right(_: &Rank, x: Tensor<3>, model: &Model) -> Tensor<3> {
    let wide = |param: &Param<Tensor<1>>| param.val().reshape([1, 1, 3]);
    x * wide(&model.weight) + wide(&model.shift) * wide(&model.frozen)
}

fn mean_square(_: &Rank, y: burn_sp::SpTensor<3>) -> LossShare {
    LossShare::mean(y.clone().mul(y))
}

#[test]
fn what_is_right_agrees() {
    let report = compare(right, mean_square).expect("all agree");
    assert_eq!(report.meshes.len(), 4);
    // Loss, output, the gradients of the input and of two parameters; the frozen one has none.
    assert!(report.meshes.iter().all(|(_, entries)| entries.len() == 5), "{report}");
    contains(&report.to_string(), &["ring 2: 5 quantities agree", "dp 2 x ulysses 2"]);
}

#[test]
fn a_wrong_output_is_named_with_its_rank() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let y = right(rank, x, model);
        if rank.device().rank() == 1 { y * 1.001 } else { y }
    };
    let difference = compare(forward, mean_square).expect_err("rank 1 is wrong");
    assert!(matches!(
        difference,
        Difference::Value { rank: 0, .. } | Difference::Value { rank: 1, .. }
    ));
    contains(
        &difference.to_string(),
        &[
            "on ring 2, rank ",
            "is off by ",
            "are allowed",
            "worst at [",
            "where f64 has ",
        ],
    );
}

/// A loss that each rank divides by its own count: the classic.
#[test]
fn a_mean_of_means_is_found() {
    let loss = |rank: &Rank, y: burn_sp::SpTensor<3>| {
        let own = y.local().dims().iter().product::<usize>() as u64;
        let ranks = rank.device().mesh().world().size() as u64;
        LossShare::new(y.clone().mul(y), own * ranks)
    };
    let difference = compare(right, loss).expect_err("counts differ");
    contains(&difference.to_string(), &["on ring 2, rank 0: the loss is off by "]);
}

/// The loss is right and the gradient is not: a parameter is detached on one rank.
#[test]
fn a_wrong_gradient_is_named_by_its_path() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let mut model = model.clone();
        if rank.device().rank() == 1 {
            model.shift = model.shift.map(|shift| shift.clone().detach() * 0.5 + shift * 0.5);
        }
        right(rank, x, &model)
    };
    let difference = compare(forward, mean_square).expect_err("a gradient is wrong");
    contains(
        &difference.to_string(),
        &["on ring 2, rank 0: the gradient of parameter \"shift\" is off by "],
    );
}

#[test]
fn a_missing_gradient_is_named() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let mut model = model.clone();
        if rank.device().mesh().world().size() > 1 {
            model.shift = model.shift.map(Tensor::detach);
        }
        right(rank, x, &model)
    };
    let difference = compare(forward, mean_square).expect_err("a gradient is missing");
    assert_eq!(
        difference.to_string(),
        "on ring 2, rank 0: the gradient of parameter \"shift\" is missing"
    );
}

#[test]
fn a_wrong_input_gradient_is_named() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let x = if rank.device().rank() == 1 {
            x.clone().detach() * 0.5 + x * 0.5
        } else {
            x
        };
        right(rank, x, model)
    };
    let difference = compare(forward, mean_square).expect_err("a gradient is wrong");
    contains(
        &difference.to_string(),
        &["on ring 2, rank 0: the gradient of input \"x\" is off by "],
    );
}

#[test]
fn a_failing_rank_is_reported() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        assert!(rank.device().rank() != 1, "rank 1 gives up");
        right(rank, x, model)
    };
    let difference = compare(forward, mean_square).expect_err("a rank fails");
    contains(
        &difference.to_string(),
        &["on ring 2: rank 1 panicked at ", "rank 1 gives up"],
    );
}

#[test]
fn partial_outputs_and_unknown_inputs_are_refused() {
    let run = |body: &(dyn Fn(&Rank) + Send + Sync)| {
        let difference = Comparison::new(model()).run(|rank, model| {
            body(rank);
            let terms = burn_sp::SpTensor::replicated(model.weight.val(), rank.device());
            Outcome::new(LossShare::mean(terms.clone()))
                .output("terms", &terms.redistribute(Axis::Ulysses, Placement::Partial))
        });
        difference.expect_err("refused").to_string()
    };
    contains(
        &run(&|_| ()),
        &["output \"terms\" is [3] partial over ulysses: redistribute it to Replicate or Shard first"],
    );
    contains(
        &run(&|rank| drop(rank.input::<1>("z"))),
        &["no input \"z\"; there are []"],
    );
}

#[test]
fn casting_keeps_what_is_trained() {
    let wide = cast(model().train(), DType::F64);
    assert_eq!(dtype_of(&wide), Some(DType::F64));
    assert!(wide.weight.is_require_grad() && !wide.frozen.is_require_grad());
    let plain = cast(model(), DType::BF16).train();
    assert_eq!(dtype_of(&plain), Some(DType::BF16));
    assert!(plain.weight.is_require_grad() && !plain.frozen.is_require_grad());
}
