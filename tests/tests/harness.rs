//! The harness finds what is wrong, and says which, where and by how much.

mod common;
mod harness {
    mod cases;
    mod fault;
    mod more;
    mod plain;
    mod seeded;
    mod step;
}

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::layout::{Axis, MeshShape, Placement};
use burn_sp::train::LossShare;
use burn_sp_tests::{Comparison, Difference, FaultKind, Outcome, Quantity, Rank, cast, dtype_of};
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

fn comparison(model: Model) -> Comparison<Model> {
    let x = TensorData::new(noise(4, 2 * 7 * 3), [2, 7, 3]).convert_dtype(DType::F32);
    Comparison::new(model).input("x", x)
}

/// Runs a forward pass whose loss is up to `loss`, given the rank and the output.
fn compare(
    forward: impl Fn(&Rank, Tensor<3>, &Model) -> Tensor<3> + Send + Sync,
    loss: impl Fn(&Rank, burn_sp::SpTensor<3>) -> LossShare + Send + Sync,
) -> Result<burn_sp_tests::Report, Difference> {
    compare_on(comparison(model()), &meshes(), forward, loss)
}

fn meshes() -> [MeshShape; 4] {
    [mesh(1, 1, 1), mesh(1, 2, 1), mesh(1, 1, 3), mesh(2, 1, 2)]
}

fn compare_on(
    comparison: Comparison<Model>,
    meshes: &[MeshShape],
    forward: impl Fn(&Rank, Tensor<3>, &Model) -> Tensor<3> + Send + Sync,
    loss: impl Fn(&Rank, burn_sp::SpTensor<3>) -> LossShare + Send + Sync,
) -> Result<burn_sp_tests::Report, Difference> {
    comparison.on(meshes).run(|rank, model| {
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
    assert_eq!(difference.first().quantity(), Some(&Quantity::Output("y".into())));
    assert_eq!(difference.first().rank(), Some(1));
    contains(
        &difference.to_string(),
        &[
            "on ring 2, rank 1: output \"y\" ",
            "is off by ",
            "are allowed",
            "worst at [",
            "where f64 has ",
        ],
    );
    // As local positions would look, but no number says that they are.
    let seen = difference.to_string();
    contains(
        &seen,
        &["others are not; single tokens of input \"x\" were changed, and who should notice does"],
    );
    assert_eq!(difference.diagnosis.expect("a diagnosis").kind, FaultKind::Unknown);
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
    let diagnosis = difference.diagnosis.expect("a diagnosis");
    assert_eq!(diagnosis.kind, FaultKind::LossWeights);
    // 3 and 4 of 7 tokens, where each counts as half.
    contains(
        &diagnosis.to_string(),
        &["the shares of ranks 0.. are 1.167, 0.875 times too large"],
    );
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
        "on ring 2, rank 0: the gradient of parameter \"shift\" is missing\n\
         likely a missing gradient, on rank 0: the gradient of \"shift\" is missing on rank 0; so are 1 of the 1 gradients that \
         differ; 0 of 1 outputs differ, not the loss, and 1 of 2 gradients\n\
         first to differ: the gradient of parameter \"shift\"; parameter \"shift\"\n\
         to do: look for a detach, a value read back into a new tensor, or gradients that are not taken from this module's graph"
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

fn ranks_of(rank: &Rank) -> usize {
    rank.device().mesh().world().size()
}

fn kind_and_first(result: Result<burn_sp_tests::Report, Difference>) -> (FaultKind, Quantity) {
    let diagnosis = result.expect_err("something differs").diagnosis.expect("a diagnosis");
    (diagnosis.kind, diagnosis.first)
}

#[test]
fn a_scale_is_found_where_it_comes_in() {
    let output = compare(
        |rank, x, model| right(rank, x, model) * ranks_of(rank) as f64,
        mean_square,
    );
    assert_eq!(kind_and_first(output), (FaultKind::Scale, Quantity::Output("y".into())));
    let loss = compare(right, |rank, y| mean_square(rank, y).scale(1.0 / ranks_of(rank) as f64));
    assert_eq!(kind_and_first(loss), (FaultKind::Scale, Quantity::Loss));
}

/// f64 tells that nothing else is wrong, even if it is rounded to f32 itself.
#[test]
fn rounding_is_no_other_fault() {
    for inside in [DType::F64, DType::F32] {
        let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
            let y = right(rank, x, model);
            match rank.dtype() {
                _ if ranks_of(rank) == 1 => y,
                DType::F32 => y.cast(DType::BF16).cast(DType::F32),
                _ => y.cast(inside).cast(DType::F64),
            }
        };
        let found = kind_and_first(compare(forward, mean_square));
        assert_eq!(found, (FaultKind::Rounding, Quantity::Output("y".into())), "{inside:?}");
    }
}

/// A number for each token, wrong at the last ones of the slices [0, 1] [2, 3, 4, 5] [6]: the successors are elsewhere.
#[test]
fn wrong_ends_of_slices_are_lost_labels() {
    let result = Comparison::new(model()).on([mesh(1, 2, 1)]).run(|rank, model| {
        let device = rank.device();
        let whole = common::tensor(
            &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            [1, 7],
            rank.dtype(),
            device.device(),
        );
        let next = |x: Tensor<2>| {
            let ends = x.dims()[1] - 1;
            Tensor::cat(vec![x.clone().narrow(1, 1, ends), x.zeros_like().narrow(1, 0, 1)], 1)
        };
        let layout = device.sequence_layout([1, 7]);
        let own = device.distribute(whole, &layout).tokenwise(next);
        let losses = own.tokenwise(|x| x * model.weight.val().sum().reshape([1, 1]));
        Outcome::new(LossShare::mean(losses.clone())).output("losses", &losses)
    });
    let difference = result.expect_err("labels are lost");
    contains(&difference.to_string(), &["only tokens [1, 5] are off"]);
    assert_eq!(
        kind_and_first(Err(difference)),
        (FaultKind::LocalLabels, Quantity::Output("losses".into()))
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
