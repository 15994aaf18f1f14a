//! Faults that look like others: what is said has to be true.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::Param;
use burn::nn::{DropoutConfig, RotaryEncodingConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Int, Tensor};
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::train::{LossShare, sum_gradients};
use burn_sp_tests::{Deviation, Difference, FaultKind, Outcome, Quantity, Rank, Report, cast};

use super::fault::Fault;
use super::seeded::{self, check};
use crate::common::{contains, mesh};
use crate::{Model, compare, compare_on, comparison, kind_and_first, mean_square, meshes, model, ranks_of, right};

fn output() -> Quantity {
    Quantity::Output("y".into())
}

fn wide(param: &Param<Tensor<1>>) -> Tensor<3> {
    param.val().reshape([1, 1, 3])
}

/// The error as text, if it is of this kind.
#[track_caller]
fn text_of(result: Result<Report, Difference>, kind: FaultKind) -> String {
    let difference = result.expect_err("something differs");
    let text = difference.to_string();
    assert_eq!(difference.diagnosis.expect("a diagnosis").kind, kind, "{text}");
    text
}

/// Whatever else is wrong: with other random numbers in each run, nothing can be compared.
#[test]
fn what_does_not_repeat_is_refused() {
    for fault in [1.0, 2.0] {
        let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
            let y = DropoutConfig::new(0.5).init().forward(right(rank, x, model));
            if rank.device().rank() > 0 { y * fault } else { y }
        };
        let difference = compare(forward, mean_square).expect_err("not to be compared");
        assert_eq!(difference.first().mesh(), MeshShape::default());
        let text = text_of(Err(difference), FaultKind::Random);
        contains(
            &text,
            &[
                "on one rank, rank 0: output \"y\" is off by ",
                "the closure run twice on one rank, in f64, gives two results",
            ],
        );
    }
}

/// One rank's own NaN is not taken for randomness.
#[test]
fn a_reference_without_numbers_is_said_to_have_none() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| right(rank, x, model) * f64::NAN;
    let text = text_of(compare(forward, mean_square), FaultKind::Unknown);
    contains(&text, &["one rank alone gives NaN, in f64"]);
}

#[test]
fn constants_of_another_dtype_are_explained() {
    let result = comparison(model()).run(|rank, model| {
        let x = rank
            .device()
            .distribute_tokens(Tensor::<2, Int>::zeros([1, 8], rank.device().device()));
        let rotary = RotaryEncodingConfig::new(8, 6).init(rank.device().device());
        let x = x.tokenwise(|x| {
            let [batch, tokens] = x.dims();
            let x = x
                .float()
                .cast(rank.dtype())
                .reshape([batch, tokens, 1])
                .repeat_dim(2, 3);
            let x = x * model.weight.val().reshape([1, 1, 3]);
            rotary.forward(Tensor::cat(vec![x.clone(), x], 2).reshape([batch, 1, tokens, 6]))
        });
        Outcome::new(LossShare::mean(x))
    });
    let difference = result.expect_err("no f64");
    assert!(
        matches!(difference.first(), Deviation::Reference { .. }),
        "{difference}"
    );
    contains(
        &difference.to_string(),
        &[
            "on one rank, in f64: rank 0 panicked at ",
            "make constants in Rank::dtype()",
            "burn_sp::nn::Rotary",
        ],
    );
}

/// Less than bf16 can tell from rounding.
#[test]
fn a_small_fault_of_a_narrow_model_is_found() {
    let run = |factor: f64| {
        let loss = |rank: &Rank, y| {
            let share = mean_square(rank, y);
            if ranks_of(rank) > 1 { share.scale(factor) } else { share }
        };
        compare_on(comparison(cast(model(), DType::BF16)), &meshes(), right, loss)
    };
    run(1.0).expect("all agree");
    let difference = run(1.001).expect_err("a thousandth is missing");
    assert_eq!(difference.first().quantity(), Some(&Quantity::Loss));
    assert_eq!(difference.first().mesh(), mesh(1, 2, 1));
}

/// Ranks of two axes are as many: either could be it.
#[test]
fn all_axes_of_a_scale_are_named() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let y = right(rank, x, model);
        if ranks_of(rank) > 1 { y * 2.0 } else { y }
    };
    let result = compare_on(comparison(model()), &[mesh(2, 1, 2)], forward, mean_square);
    let text = text_of(result, FaultKind::Scale);
    contains(
        &text,
        &["every element is 2.000 times the right one: the ranks of dp, or of ulysses;"],
    );
}

#[test]
fn a_bias_is_repeated_only_as_often_as_ranks_do() {
    let times = |times: f64| {
        let forward = move |rank: &Rank, x: Tensor<3>, model: &Model| {
            let y = right(rank, x, model);
            if ranks_of(rank) > 1 {
                y + wide(&model.shift) * times
            } else {
                y
            }
        };
        compare_on(comparison(model()), &[MeshShape::tp(3)], forward, mean_square)
    };
    contains(
        &text_of(times(2.0), FaultKind::RepeatedBias),
        &["every token is off by 2.000 times \"shift\";"],
    );
    for wrong in [-1.0, -0.5, 1.0] {
        let seen = format!("every token is off by {wrong:.3} times \"shift\": it is missing, or scaled");
        contains(&text_of(times(wrong), FaultKind::Unknown), &[&seen]);
    }
}

/// Ranks 0 and 1 see all.
#[test]
fn one_lost_hop_is_no_local_attention() {
    let result = comparison(model()).on([mesh(1, 1, 3)]).run(|rank, model| {
        let x = rank.input::<3>("x");
        let layout = rank.device().sequence_layout(x.dims());
        let own = rank.device().distribute(x, &layout);
        let all = own
            .clone()
            .redistribute(Axis::Ulysses, Placement::Replicate)
            .into_local();
        let seen = if rank.device().rank() == 2 {
            all.narrow(1, 3, 4)
        } else {
            all
        };
        let y = own.tokenwise(|x| x * wide(&model.weight) + seen.sum_dim(1));
        Outcome::new(mean_square(rank, y.clone())).output("y", &y)
    });
    let text = text_of(result, FaultKind::LocalTokens);
    contains(
        &text,
        &[
            "those of ranks 0 are not seen by ranks 2 (",
            "likely tokens of other ranks that are not seen",
        ],
    );
}

#[test]
fn other_bits_are_said_to_be_right() {
    let result = comparison(model()).run(|rank, model| {
        let x = rank.input::<3>("x");
        let layout = rank.device().sequence_layout(x.dims());
        let y = rank
            .device()
            .distribute(x, &layout)
            .tokenwise(|x| right(rank, x, model));
        let loss = mean_square(rank, y);
        let grads = GradientsParams::from_grads(loss.backward(), model);
        let grads = sum_gradients(model, grads, rank.layouts(), rank.device().mesh());
        Outcome::of_step(loss.value() * (1.0 + rank.device().rank() as f64 * 1e-15), grads)
    });
    let text = text_of(result, FaultKind::Unknown);
    contains(
        &text,
        &[
            "on ulysses 2: the loss has other bits on rank 1 than on rank 0",
            "the loss is right, but does not have the same bits on all ranks",
        ],
    );
}

/// The first feature alone is rotated: wrong for every token, but no head is elsewhere.
#[test]
fn positions_of_some_features_are_no_layout() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let [batch, tokens, _] = x.dims();
        let angles = Tensor::<1, Int>::arange(0..tokens as i64, &x.device())
            .float()
            .cast(rank.dtype());
        let turned = x.clone().narrow(2, 0, 1) * angles.cos().reshape([1, tokens, 1]).expand([batch, tokens, 1]);
        right(rank, Tensor::cat(vec![turned, x.narrow(2, 1, 2)], 2), model)
    };
    let found = kind_and_first(compare(forward, mean_square));
    assert_eq!(found, (FaultKind::LocalPositions, output()));
}

/// The first feature comes from the token before, which the first of a slice does not see.
#[test]
fn a_local_shift_of_some_features_is_no_layout() {
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let tokens = x.dims()[1];
        let first = x.clone().narrow(2, 0, 1);
        let first = Tensor::cat(
            vec![first.zeros_like().narrow(1, 0, 1), first.narrow(1, 0, tokens - 1)],
            1,
        );
        right(rank, Tensor::cat(vec![first, x.narrow(2, 1, 2)], 2), model)
    };
    let result = compare_on(comparison(model()), &[mesh(1, 1, 3)], forward, mean_square);
    let text = text_of(result, FaultKind::LocalTokens);
    contains(
        &text,
        &["those of ranks 0 are not seen by ranks 1, those of ranks 1 are not seen by ranks 2"],
    );
}

/// Tokens in dim 2.
#[test]
fn other_dims_are_not_taken_for_tokens() {
    let run = |fault: fn(&Rank, Tensor<4>) -> Tensor<4>| {
        comparison(model()).on([mesh(1, 1, 2)]).run(move |rank, model| {
            let x = rank.input::<3>("x").unsqueeze_dim::<4>(1).repeat_dim(1, 2);
            let layout = Layout::replicated(x.dims()).shard(2, Axis::Ulysses, Split::Contiguous);
            let y = rank.device().distribute(x, &layout).tokenwise(|x| {
                let y = x * model.weight.val().reshape([1, 1, 1, 3]);
                if ranks_of(rank) > 1 { fault(rank, y) } else { y }
            });
            Outcome::new(LossShare::mean(y.clone().mul(y.clone()))).output("y", &y)
        })
    };
    let one_feature = |rank: &Rank, y: Tensor<4>| match rank.device().rank() {
        1 => Tensor::cat(vec![y.clone().narrow(3, 0, 1) * 1.5, y.narrow(3, 1, 2)], 3),
        _ => y,
    };
    text_of(run(one_feature), FaultKind::Unknown);
    text_of(run(|_, y| y * 2.0), FaultKind::Scale);
}

#[test]
fn a_missing_sum_is_confirmed() {
    let result = check(seeded::Model::Plain, MeshShape::tp(2), Fault::ProductNotSummed);
    let text = text_of(result, FaultKind::MissingSum);
    let sum = "the sum over tp of what was added to output \"blocks.0.attention\", less 1 times \"blocks.0.down.bias\", is right";
    contains(&text, &[sum]);

    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let y = right(rank, x, model);
        if rank.device().rank() == 1 { y * 1.1 } else { y }
    };
    let result = compare_on(comparison(model()), &[MeshShape::tp(2)], forward, mean_square);
    let text = text_of(result, FaultKind::Unknown);
    contains(
        &text,
        &["ranks [0, 1] should have the same values, and differ; no sum over them is right"],
    );
}

/// A closure that refuses other inputs than it was given is asked once.
#[test]
fn failing_probes_end() {
    let refused = AtomicUsize::new(0);
    let forward = |rank: &Rank, x: Tensor<3>, model: &Model| {
        let first = rank.input::<3>("x").to_data().iter::<f64>().next();
        if first != Some(crate::common::noise(4, 1)[0]) {
            refused.fetch_add(1, Ordering::Relaxed);
            panic!("another input");
        }
        let y = right(rank, x, model);
        if rank.device().rank() == 1 { y * 1.001 } else { y }
    };
    text_of(compare(forward, mean_square), FaultKind::Unknown);
    assert_eq!(refused.into_inner(), 1);
}
