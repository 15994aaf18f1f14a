//! All outputs are right, and the loss is not.

use std::collections::{BTreeMap, BTreeSet};

use super::changes::{Change, Point, rerun, token_inputs, truncated};
use super::numbers::{factor, off, weights};
use super::probes::slices;
use super::sheet::tokens_in_dim_1;
use super::{FaultKind, Finding, Scene};
use crate::run::{Detail, Run};
use crate::{Quantity, Values};

pub(super) fn find(scene: &Scene<'_>) -> Option<Finding> {
    own_part(scene)
        .or_else(|| scale(scene))
        .or_else(|| weighed(scene))
        .or_else(|| probed(scene))
}

/// Every rank reports its own part.
fn own_part(scene: &Scene<'_>) -> Option<Finding> {
    let losses: Vec<f64> = scene.ranks.iter().map(|run| run.loss).collect();
    if losses.iter().all(|loss| *loss == losses[0]) {
        return None;
    }
    let noise = scene.noise(&Quantity::Loss)?;
    let sum: f64 = losses.iter().sum();
    let fits = |value: f64| noise.explains((value - scene.truth.loss).abs(), losses.len() as f64);
    let what = if fits(sum) {
        "their sum"
    } else if fits(sum / losses.len() as f64) {
        "their mean"
    } else {
        return None;
    };
    let evidence = format!("ranks report different losses, {losses:?}; {what} is right");
    Some(Finding::new(FaultKind::MissingSum, evidence))
}

fn scale(scene: &Scene<'_>) -> Option<Finding> {
    let noise = scene.noise(&Quantity::Loss)?;
    let factor = factor(scene.mesh, &[scene.ranks[0].loss], &[scene.truth.loss], noise)?;
    let evidence = format!(
        "the loss is {:.3} times the right one: the ranks of {}",
        factor.value, factor.axes
    );
    Some(Finding::new(FaultKind::Scale, evidence))
}

/// The right gradient of a parameter is the sum of the ranks' terms with other weights than 1. That is so of what lies
/// between the last attention and the loss: there, a rank's term is what its own tokens' losses gave.
fn weighed(scene: &Scene<'_>) -> Option<Finding> {
    let runs = scene.run(scene.mesh, scene.inputs, Detail::Terms)?;
    scene.gradients().into_iter().take(8).find_map(|path| {
        let truth = &scene.truth.gradients[path];
        let terms: Option<Vec<&Values>> = runs.iter().map(|run| run.terms.get(path)).collect();
        let terms = terms.filter(|terms| terms.iter().all(|term| term.shape == truth.shape))?;
        let terms: Vec<Vec<f64>> = terms.iter().map(|term| term.elements.clone()).collect();
        let weights = weights(&terms, &truth.elements)?;
        let sum = |at: usize| terms.iter().zip(&weights).map(|(term, weight)| weight * term[at]).sum();
        let sum: Vec<f64> = (0..truth.elements.len()).map(sum).collect();
        let noise = scene.noise(&Quantity::Gradient(path.to_owned()))?;
        let even = weights.iter().all(|weight| (weight - weights[0]).abs() < 1e-3);
        if even || truth.elements.len() <= terms.len() || !noise.explains(off(&sum, &truth.elements), 1.0) {
            return None;
        }
        let shares: Vec<String> = weights.iter().map(|weight| format!("{:.3}", weight.recip())).collect();
        let evidence = format!(
            "the gradient of {path:?} is right if the ranks' terms are weighed anew: the shares of ranks 0.. are {} times too large",
            shares.join(", ")
        );
        Some(Finding::new(FaultKind::LossWeights, evidence))
    })
}

/// Changes single tokens, and compares what that does to the loss with what it does on one rank.
fn probed(scene: &Scene<'_>) -> Option<Finding> {
    let by_token = |name: &str| tokens_in_dim_1(scene.mesh, scene.ranks, name);
    let output = scene.truth.outputs.iter().rev().find(|piece| by_token(&piece.name))?;
    let names = token_inputs(scene, output);
    if let Some(finding) = one_token_each(scene, &output.name, &names) {
        return Some(finding);
    }
    let points = points(scene, &output.name);
    names.into_iter().find_map(|input| {
        let ratio = |point: &Point| {
            let [single, sharded] = rerun(scene, input, &[*point], Change::Other)?;
            let change = |before: &[Run], after: &[Run]| after[0].loss - before[0].loss;
            let right = change(std::slice::from_ref(scene.truth), &single);
            // Far above rounding.
            (right.abs() > 1e-4 * scene.truth.loss.abs()).then(|| change(scene.ranks, &sharded) / right)
        };
        let ratios: BTreeMap<Point, f64> = points
            .keys()
            .filter_map(|point| Some((*point, ratio(point)?)))
            .collect();
        conclude(&points, &ratios, input)
    })
}

/// Cuts the sequences to one token a rank. Shifted inside its slice, no token has a label left; and of a mean of means, the last
/// rank's mean is 0, or 0/0.
fn one_token_each(scene: &Scene<'_>, name: &str, inputs: &[&str]) -> Option<Finding> {
    let mut owners: BTreeMap<usize, BTreeSet<Vec<usize>>> = BTreeMap::new();
    for run in scene.ranks {
        let positions = &run.output(name)?.positions;
        for sample in &positions[0] {
            owners.entry(*sample).or_default().insert(positions[1].clone());
        }
    }
    let ranks = owners.values().map(BTreeSet::len).max().filter(|ranks| *ranks > 1)?;
    let last = scene.truth.output(name)?.shape[1].checked_sub(ranks)?;
    let [alone, runs] = truncated(scene, inputs, last)?;
    let (single, sharded) = (alone[0].loss, runs[0].loss);
    let seen = format!("with sequences of {ranks} tokens, one a rank, the loss is {sharded}, on one rank {single}");
    let ratio = sharded / single;
    if single > 0.0 && ratio == 0.0 {
        let evidence = format!("{seen}: no token has a label left");
        return Some(Finding::new(FaultKind::LocalLabels, evidence));
    }
    let finite = |run: &Run| {
        run.outputs
            .iter()
            .flat_map(|piece| &piece.local.elements)
            .all(|x| x.is_finite())
    };
    let counts = if sharded.is_nan() && single.is_finite() && runs.iter().all(finite) {
        "divides by the number of its own"
    } else if (ratio - (ranks - 1) as f64 / ranks as f64).abs() < 1e-3 {
        "counts as much as the others"
    } else {
        return None;
    };
    let evidence = format!("{seen}: the last rank, which has no label, {counts}");
    Some(Finding::new(FaultKind::LossWeights, evidence))
}

/// The rank of a token, and whether it is the first of a slice, so that its label belongs to another one.
type Places = BTreeMap<Point, (usize, bool)>;

fn points(scene: &Scene<'_>, name: &str) -> Places {
    let mut places = Places::new();
    for (rank, run) in scene.ranks.iter().enumerate() {
        let Some(piece) = run.output(name) else { continue };
        let Some(sample) = piece.positions[0].first() else {
            continue;
        };
        for (start, end) in slices(&piece.positions[1]) {
            for token in [start, start + 1, end - 1] {
                if token < end {
                    places.insert((*sample, token), (rank, token == start && token > 0));
                }
            }
        }
    }
    places
}

fn conclude(places: &Places, ratios: &BTreeMap<Point, f64>, input: &str) -> Option<Finding> {
    let alike = |a: f64, b: f64| (a - b).abs() <= 1e-2 * b.abs();
    let inner: Vec<(Point, f64)> = ratios
        .iter()
        .filter(|(point, _)| !places[point].1)
        .map(|(p, r)| (*p, *r))
        .collect();
    let mut sorted: Vec<f64> = inner.iter().map(|(_, ratio)| *ratio).collect();
    sorted.sort_by(f64::total_cmp);
    let usual = *sorted.get(sorted.len() / 2)?;
    let other = |(point, ratio): (&Point, &f64)| (!alike(*ratio, usual)).then_some(*point);
    let others: Vec<Point> = ratios.iter().filter_map(other).collect();
    let seen = format!("single tokens of input {input:?} were changed");
    if !others.is_empty() && others.iter().all(|point| places[point].1) {
        let tokens: Vec<usize> = others.iter().map(|(_, token)| *token).collect();
        let evidence = format!(
            "{seen}: what that does to the loss is wrong for tokens {tokens:?} alone, which are the first of their slices and the \
             labels of tokens on other ranks"
        );
        return Some(Finding::new(FaultKind::LocalLabels, evidence));
    }
    // Changes that only one rank notices show that rank's weight. If others notice too, no single weight fits.
    let weight = |rank: usize| {
        let of_rank = || {
            inner
                .iter()
                .filter(|(point, _)| places[point].0 == rank)
                .map(|(_, ratio)| *ratio)
        };
        let first = of_rank().next()?;
        (of_rank().count() > 1 && of_rank().all(|ratio| alike(ratio, first))).then_some((rank, first))
    };
    let ranks: BTreeSet<usize> = places.values().map(|(rank, _)| *rank).collect();
    let weights: Vec<(usize, f64)> = ranks.into_iter().map(weight).collect::<Option<_>>()?;
    let differ = weights.iter().any(|(_, weight)| !alike(*weight, weights[0].1));
    let (rank, weight) = weights.into_iter().rev().find(|(_, weight)| !alike(*weight, 1.0))?;
    differ.then(|| {
        let evidence = format!(
            "{seen}: tokens of rank {rank} change the loss {weight:.3} times as much as they should, others not"
        );
        Finding::new(FaultKind::LossWeights, evidence)
    })
}
