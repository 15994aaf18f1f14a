//! A right step on many meshes has no diagnosis; with one fault, the diagnosis says kind, first layer, parameter and rank.

use burn_sp::layout::MeshShape;
use burn_sp_tests::{FaultKind, Quantity};

use super::fault::Fault;
use super::seeded::{Model, check};
use crate::common::mesh;

/// What a diagnosis has to say.
struct Case {
    model: Model,
    fault: Fault,
    mesh: MeshShape,
    kind: FaultKind,
    first: Quantity,
    parameter: &'static str,
    rank: usize,
}

/// One row a fault.
#[rustfmt::skip]
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |models: &[Model], fault, meshes: &[MeshShape], kind, first: Quantity, parameter, rank| {
        for model in models {
            for mesh in meshes {
                cases.push(Case {
                    model: *model,
                    fault,
                    mesh: *mesh,
                    kind,
                    first: first.clone(),
                    parameter,
                    rank,
                });
            }
        }
    };
    let output = |name: &str| Quantity::Output(name.into());
    let gradient = |path: &str| Quantity::Gradient(path.into());
    let (plain, llama, both) = ([Model::Plain], [Model::Llama], [Model::Plain, Model::Llama]);
    let (ulysses, ring) = ([MeshShape::ulysses(2), MeshShape::ulysses(4)], [MeshShape::ring(2)]);
    let (dp, tp) = ([mesh(2, 1, 1)], [MeshShape::tp(2)]);
    let tokens = [ulysses[0], ulysses[1], ring[0], dp[0]];
    let any = [ulysses[0], ulysses[1], ring[0], dp[0], tp[0]];
    let head = "head.weight";

    use FaultKind as Is;
    add(&both, Fault::LossOnAllRanks, &tokens, Is::Scale, gradient(head), head, 0);
    add(&both, Fault::GradientsAveraged, &tokens, Is::Scale, gradient(head), head, 0);
    add(&both, Fault::GradientsNotSummed, &tokens, Is::MissingSum, gradient(head), head, 0);
    add(&both, Fault::GradientsSummedTwice, &tokens, Is::Scale, gradient(head), head, 0);
    add(&both, Fault::MeanOfMeans, &tokens, Is::LossWeights, Quantity::Loss, head, 0);
    add(&both, Fault::MeansAveraged, &tokens, Is::LossWeights, Quantity::Loss, head, 0);
    add(&both, Fault::PlainMeans, &tokens, Is::LossWeights, Quantity::Loss, head, 0);
    add(&both, Fault::LossNotSummed, &tokens, Is::MissingSum, Quantity::Loss, "", 0);
    add(&plain, Fault::NormNotSummedOverTp, &tp, Is::MissingSum, gradient("norm.beta"), "norm.beta", 1);
    add(&llama, Fault::NormNotSummedOverTp, &tp, Is::MissingSum, gradient("norm.Rms.gamma"), "norm.Rms.gamma", 0);
    let sliced = [ulysses[0], ulysses[1], ring[0]];
    add(&both, Fault::LabelsShiftedLocally, &sliced, Is::LocalLabels, Quantity::Loss, head, 0);
    add(&plain, Fault::LocalPositions, &ulysses, Is::LocalPositions, output("embedding"), head, 1);
    add(&plain, Fault::LocalPositions, &ring, Is::LocalPositions, output("embedding"), head, 0);
    add(&llama, Fault::LocalPositions, &ulysses, Is::LocalPositions, output("blocks.0"), head, 1);
    add(&llama, Fault::LocalPositions, &ring, Is::LocalPositions, output("blocks.0"), head, 0);
    let heads = output("blocks.0.heads");
    add(&plain, Fault::LocalAttention, &ulysses, Is::LocalTokens, heads.clone(), head, 1);
    add(&plain, Fault::LocalAttention, &ring, Is::LocalTokens, heads.clone(), head, 0);
    add(&plain, Fault::LocalMask, &ulysses, Is::LocalMask, heads.clone(), head, 1);
    add(&plain, Fault::LocalMask, &ring, Is::LocalMask, heads.clone(), head, 0);
    add(&both, Fault::WrongSlices, &sliced, Is::Layout, output("embedding"), head, 0);
    add(&plain, Fault::TiledHeads, &sliced, Is::Layout, heads.clone(), head, 0);
    add(&plain, Fault::BiasOnEveryRank, &tp, Is::RepeatedBias, output("blocks.0"), "blocks.0.down.bias", 0);
    add(&plain, Fault::ProductNotSummed, &tp, Is::MissingSum, output("blocks.0"), head, 0);
    let sliced_dropout = output("embedding");
    add(&plain, Fault::LocalDropout, &sliced, Is::Random, sliced_dropout.clone(), head, 0);
    // The first two samples start at index 0 in the batch and on their rank.
    add(&plain, Fault::LocalDropout, &dp, Is::Random, sliced_dropout.clone(), head, 1);
    add(&plain, Fault::OtherHead, &tokens, Is::OtherParameters, Quantity::Loss, head, 1);
    let moved = Quantity::Parameter("embedding.weight".into());
    add(&both, Fault::OtherRates, &any, Is::Diverging, moved, "embedding.weight", 1);

    for fault in [Fault::ScaledOnOneRank, Fault::NotANumber, Fault::OtherActivation] {
        add(&plain, fault, &tokens, Is::Unknown, output("blocks.0"), head, 1);
    }
    add(&plain, Fault::Clipped, &tokens, Is::Unknown, sliced_dropout, head, 1);
    add(&plain, Fault::WrongMerge, &tokens, Is::Unknown, heads, head, 0);
    cases
}

#[test]
fn seeded_faults_are_diagnosed() {
    let cases = cases();
    let mut wrong = Vec::new();
    for case in &cases {
        let name = format!("{:?} in {:?} on {}", case.fault, case.model, case.mesh);
        let difference = match check(case.model, case.mesh, case.fault) {
            Err(difference) => difference,
            Ok(report) => panic!("{name}: {report}"),
        };
        let Some(found) = &difference.diagnosis else {
            panic!("{name}: {difference}");
        };
        let parameter = found.parameter.as_deref().unwrap_or("");
        let found = (found.kind, &found.first, parameter, found.rank);
        if found != (case.kind, &case.first, case.parameter, case.rank) {
            wrong.push(format!("{name}: {difference}"));
        }
    }
    let right = cases.len() - wrong.len();
    assert!(
        wrong.is_empty(),
        "{right} of {} are right:\n{}",
        cases.len(),
        wrong.join("\n\n")
    );
}

#[test]
fn a_right_step_has_no_diagnosis() {
    for model in [Model::Plain, Model::Llama] {
        let tokens = [
            mesh(1, 1, 2),
            mesh(1, 1, 4),
            mesh(1, 2, 1),
            mesh(2, 1, 1),
            mesh(2, 1, 2),
        ];
        for mesh in tokens.into_iter().chain([MeshShape::tp(2)]) {
            for fault in [Fault::None, Fault::OwnStep] {
                let report = check(model, mesh, fault);
                report.unwrap_or_else(|difference| panic!("{fault:?}, {model:?}, {mesh}: {difference}"));
            }
        }
    }
}
