//! An output is wrong: what of it, and how.

use std::collections::BTreeSet;

use super::numbers::{axes, dot, factor, off, same_multiset, size};
use super::probes::Probes;
use super::sheet::{Row, Sheet, tokens_in_dim_1};
use super::terms::{missing_sum, not_alike};
use super::{FaultKind, Finding, Scene};
use crate::{Deviation, Quantity};

pub(super) fn find(scene: &Scene<'_>, name: &str) -> Option<Finding> {
    let truth = scene.truth.output(name)?;
    if let Deviation::Kind { found, expected, .. } = &scene.deviations[0] {
        let mut pieces = scene.ranks.iter().filter_map(|run| run.output(name));
        let kind = match pieces.all(|piece| piece.shape == truth.shape) {
            true => FaultKind::Unknown,
            false => FaultKind::Layout,
        };
        let how = format!("the whole tensor is {found}, on one rank {expected}");
        return Some(Finding::new(kind, how));
    }
    let noise = scene.noise(&Quantity::Output(name.to_owned()))?;
    let sheet = Sheet::new(scene.ranks, truth, noise)?;
    let found = missing_sum(scene, &sheet, name).or_else(|| scale(scene, &sheet));
    if found.is_some() || !tokens_in_dim_1(scene.mesh, scene.ranks, name) {
        return found.or_else(|| not_alike(&sheet));
    }
    let wrong = sheet.wrong();
    let found = repeated_bias(scene, &sheet)
        .or_else(|| moved(&sheet, &wrong))
        .or_else(|| at_ends(&sheet, &wrong));
    if found.is_some() {
        return found;
    }
    let probes = Probes::of_output(scene, name, &sheet);
    scattered(&sheet, &wrong, probes.as_ref())
        .or_else(|| probes.as_ref()?.find())
        .or_else(|| in_columns(&sheet, &wrong))
        .or_else(|| not_alike(&sheet))
        .or_else(|| later_ranks(&sheet, &wrong, probes.as_ref()))
}

fn scale(scene: &Scene<'_>, sheet: &Sheet) -> Option<Finding> {
    let all = |of: fn(&Row) -> &Vec<f64>| sheet.rows.iter().flat_map(of).copied().collect::<Vec<_>>();
    let factor = factor(scene.mesh, &all(|row| &row.found), &all(|row| &row.truth), sheet.noise)?;
    Some(Finding::new(
        FaultKind::Scale,
        format!(
            "every element is {:.3} times the right one: the ranks of {}",
            factor.value, factor.axes
        ),
    ))
}

/// Every token is off by the same vector, which is a multiple of a parameter.
fn repeated_bias(scene: &Scene<'_>, sheet: &Sheet) -> Option<Finding> {
    let rows: Vec<&Row> = sheet
        .rows
        .iter()
        .filter(|row| row.found.len() == sheet.features)
        .collect();
    if rows.len() < 2 || sheet.features < 2 {
        return None;
    }
    let error = |row: &Row| row.found.iter().zip(&row.truth).map(|(a, b)| a - b).collect::<Vec<_>>();
    let mut mean = vec![0.0; sheet.features];
    for row in &rows {
        for (sum, x) in mean.iter_mut().zip(error(row)) {
            *sum += x / rows.len() as f64;
        }
    }
    if !rows
        .iter()
        .all(|row| sheet.noise.explains(off(&error(row), &mean), 1.0))
    {
        return None;
    }
    let parameters = scene.parameters()?;
    let vectors = parameters.iter().filter(|(_, values)| values.shape == [sheet.features]);
    let multiple = vectors.filter_map(|(path, values)| {
        let times = dot(&mean, &values.elements) / dot(&values.elements, &values.elements);
        let scaled: Vec<f64> = values.elements.iter().map(|x| times * x).collect();
        sheet.noise.explains(off(&mean, &scaled), 1.0).then_some((path, times))
    });
    // Once too often for each rank but one.
    let repeats = |times: f64| {
        let mut sizes = axes(scene.mesh).into_iter().map(|axes| size(scene.mesh, &axes));
        sizes.any(|ranks| (times - (ranks - 1) as f64).abs() < 1e-3)
    };
    let (path, times) = multiple.max_by_key(|(_, times)| repeats(*times))?;
    let (kind, rather) = match repeats(times) {
        true => (FaultKind::RepeatedBias, ""),
        false => (FaultKind::Unknown, ": it is missing, or scaled"),
    };
    Some(Finding {
        parameter: Some(path.clone()),
        ..Finding::new(kind, format!("every token is off by {times:.3} times {path:?}{rather}"))
    })
}

/// The right numbers at other places: of another token, or within the token.
fn moved(sheet: &Sheet, wrong: &[&Row]) -> Option<Finding> {
    if sheet.features < 2 {
        return None;
    }
    // Enough to tell.
    let sample: Vec<&Row> = wrong.iter().take(64).copied().collect();
    let home = |row: &Row| sheet.rows.iter().find(|other| sheet.alike(&row.found, &other.truth));
    let homes: Vec<(&Row, &Row)> = sample.iter().filter_map(|row| Some((*row, home(row)?))).collect();
    let most = |count: usize| count > 0 && 10 * count >= 9 * sample.len();
    if most(homes.len()) {
        let (row, home) = homes[0];
        let evidence = format!(
            "the rows are right, but of other tokens: where token {} of sample {} should be, rank {} has token {} of sample {}",
            row.token, row.sample, row.rank, home.token, home.sample
        );
        return Some(Finding::new(FaultKind::Layout, evidence));
    }
    let within = |row: &&&Row| same_multiset(&row.found, &row.truth, sheet.threshold);
    if sheet.features > 2 && most(sample.iter().filter(within).count()) {
        let evidence = "every token has its own numbers, in another order of features";
        return Some(Finding::new(FaultKind::Layout, evidence));
    }
    None
}

/// A number a token, wrong where slices end: the label of the next token is on another rank.
fn at_ends(sheet: &Sheet, wrong: &[&Row]) -> Option<Finding> {
    let ends = sheet.features == 1 && wrong.iter().all(|row| row.last) && sheet.rows.iter().any(|row| !row.last);
    ends.then(|| {
        let tokens: BTreeSet<usize> = wrong.iter().map(|row| row.token).collect();
        let tokens = Vec::from_iter(tokens);
        let evidence = format!("only tokens {tokens:?} are off, the last of their slices");
        Finding::new(FaultKind::LocalLabels, evidence)
    })
}

/// The features that are right and those that are wrong in (nearly) all wrong rows; None if there are others.
fn columns(sheet: &Sheet, wrong: &[&Row]) -> Option<[BTreeSet<usize>; 2]> {
    let mut counts = vec![[0usize; 2]; sheet.features];
    for row in wrong {
        for (at, column) in row.columns.iter().enumerate() {
            counts[*column][usize::from(sheet.is_wrong(row.found[at], row.truth[at]))] += 1;
        }
    }
    let [mut right, mut off] = [BTreeSet::new(), BTreeSet::new()];
    for (column, [good, bad]) in counts.into_iter().enumerate() {
        match good + bad {
            0 => {}
            all if 20 * bad >= 19 * all => drop(off.insert(column)),
            all if 20 * good >= 19 * all => drop(right.insert(column)),
            _ => return None,
        }
    }
    (!right.is_empty() && !off.is_empty()).then_some([right, off])
}

/// Some features are wrong for every token, and the others for none: heads that are not where they should be, if nothing is wrong with
/// tokens.
fn in_columns(sheet: &Sheet, wrong: &[&Row]) -> Option<Finding> {
    let [right, off] = columns(sheet, wrong)?;
    let tokens = |rows: &mut dyn Iterator<Item = &Row>| -> BTreeSet<(usize, usize)> {
        rows.map(|row| (row.sample, row.token)).collect()
    };
    if wrong.len() < 3 || tokens(&mut wrong.iter().copied()) != tokens(&mut sheet.rows.iter()) {
        return None;
    }
    let (first, last) = (off.first()?, off.last()?);
    let evidence = format!(
        "of {} features, {} are right for every token and {} (from {first} to {last}) for none: whole heads are wrong",
        sheet.features,
        right.len(),
        off.len()
    );
    Some(Finding::new(FaultKind::Layout, evidence))
}

/// Elements right and wrong side by side, in other places for every token, whatever their values are.
fn scattered(sheet: &Sheet, wrong: &[&Row], probes: Option<&Probes<'_>>) -> Option<Finding> {
    if columns(sheet, wrong).is_some() {
        return None;
    }
    let elements = || wrong.iter().flat_map(|row| row.found.iter().zip(&row.truth));
    let count = |of: &dyn Fn(f64, f64) -> bool| elements().filter(|(found, truth)| of(**found, **truth)).count();
    let all = elements().count();
    let off = count(&|found, truth| sheet.is_wrong(found, truth));
    // What both runs drop is no sign.
    let kept = count(&|found, truth| found != 0.0 && truth != 0.0);
    let right = count(&|found, truth| found != 0.0 && truth != 0.0 && !sheet.is_wrong(found, truth));
    if 20 * right < kept || right == 0 || 100 * off < all || sheet.features < 4 {
        return None;
    }
    let lost = count(&|found, truth| found == 0.0 && truth != 0.0);
    let gained = count(&|found, truth| found != 0.0 && truth == 0.0);
    let how = if right == kept && lost > 0 && gained > 0 {
        format!("{lost} are 0 where they should not be, {gained} should be 0 and are not")
    } else if probes?.same_elements(wrong) {
        "the same ones if the tokens are others".to_owned()
    } else {
        return None;
    };
    let evidence = format!(
        "in the tokens that are off, {off} of {all} elements are wrong, here and there, and the others are right; {how}"
    );
    Some(Finding::new(FaultKind::Random, evidence))
}

/// Where it is wrong does not tell why.
fn later_ranks(sheet: &Sheet, wrong: &[&Row], probes: Option<&Probes<'_>>) -> Option<Finding> {
    let own = |row: &Row| row.token == row.local;
    let first = sheet.rows.iter().any(own) && sheet.rows.iter().any(|row| !own(row));
    (first && !wrong.iter().any(|row| own(row))).then(|| {
        let probed = match probes {
            Some(probes) => format!(
                "single tokens of input {:?} were changed, and who should notice does",
                probes.input
            ),
            None => "local positions or local attention would look so: take tokens from Rank::int_input to tell".to_owned(),
        };
        let evidence = format!(
            "all tokens are right whose place on their rank is their place in the sequence, and others are not; {probed}"
        );
        Finding::new(FaultKind::Unknown, evidence)
    })
}
