//! Outputs and loss are right, and gradients are not.

use super::numbers::{axes, factor, group, names, off};
use super::{FaultKind, Finding, Scene};
use crate::{Quantity, Values};

pub(super) fn find(scene: &Scene<'_>) -> Option<Finding> {
    let paths = scene.gradients();
    let found: Vec<Option<Finding>> = paths.iter().map(|path| of_one(scene, path)).collect();
    let mut first = found.iter().flatten().next()?.kind;
    // The most frequent; the first of those, counted from the loss.
    let count = |kind: FaultKind| found.iter().flatten().filter(|finding| finding.kind == kind).count();
    for finding in found.iter().flatten() {
        if count(finding.kind) > count(first) {
            first = finding.kind;
        }
    }
    let same = count(first);
    let mut finding = found.into_iter().flatten().find(|finding| finding.kind == first)?;
    finding.evidence = format!(
        "{}; so are {same} of the {} gradients that differ",
        finding.evidence,
        paths.len()
    );
    Some(finding)
}

fn of_one(scene: &Scene<'_>, path: &str) -> Option<Finding> {
    let here = |finding| {
        Some(Finding {
            parameter: Some(path.to_owned()),
            ..finding
        })
    };
    let truth = scene.truth.gradients.get(path)?;
    let found: Vec<Option<&Values>> = scene.ranks.iter().map(|run| run.gradients.get(path)).collect();
    let missing = |rank: usize, how: &str| {
        here(Finding {
            rank: Some(rank),
            ..Finding::new(
                FaultKind::MissingGradient,
                format!("the gradient of {path:?} is {how} on rank {rank}"),
            )
        })
    };
    if let Some(rank) = found.iter().position(Option::is_none) {
        return missing(rank, "missing");
    }
    let found: Option<Vec<&Values>> = found.into_iter().collect();
    let found = found.filter(|found| found.iter().all(|values| values.shape == truth.shape))?;
    let noise = scene.noise(&Quantity::Gradient(path.to_owned()))?;
    for axes in axes(scene.mesh) {
        let right = (0..found.len()).all(|rank| {
            let group = group(scene.mesh, rank, &axes);
            let sum: Vec<f64> = (0..truth.elements.len())
                .map(|at| group.iter().map(|rank| found[*rank].elements[at]).sum())
                .collect();
            noise.explains(off(&sum, &truth.elements), group.len() as f64)
        });
        let apart = found.iter().any(|values| !values.same_bits(found[0]));
        if right && apart {
            let evidence = format!(
                "the gradient of {path:?} is right once it is summed over {}",
                names(&axes)
            );
            return here(Finding::new(FaultKind::MissingSum, evidence));
        }
    }
    if let Some(rank) = found.iter().position(|values| values.peak() == 0.0) {
        return missing(rank, "zero");
    }
    let factor = factor(scene.mesh, &found[0].elements, &truth.elements, noise)?;
    let how = if factor.value > 1.0 {
        "every rank differentiates the whole loss, or gradients are summed more than once"
    } else {
        "gradients are averaged, or each share is divided by the ranks too"
    };
    here(Finding::new(
        FaultKind::Scale,
        format!(
            "the gradient of {path:?} is {:.3} times the right one, by the ranks of {}: {how}",
            factor.value, factor.axes
        ),
    ))
}
