//! Ranks that should hold the same numbers do not: each has a term.

use super::numbers::{axes, group, names, size};
use super::sheet::{Row, Sheet, whole};
use super::{FaultKind, Finding, Scene};

/// Ranks that should hold the same value hold terms of it; perhaps each with the residual stream that they were added to, or
/// with a bias.
pub(super) fn missing_sum(scene: &Scene<'_>, sheet: &Sheet, name: &str) -> Option<Finding> {
    let replicas = sheet.replicas();
    let ranks = apart(sheet, &replicas)?;
    let at = scene.truth.outputs.iter().position(|piece| piece.name == name)?;
    let shape = &scene.truth.outputs[at].shape;
    let before = scene.truth.outputs[..at].iter().filter(|piece| piece.shape == *shape);
    let streams: Vec<_> = before.rev().map(|piece| (&piece.name, whole(piece))).collect();
    let mut biases = scene.parameters().unwrap_or_default();
    biases.retain(|_, values| values.shape == [sheet.features]);

    let index = |row: &Row, i: usize| (row.sample * shape[1] + row.token) * sheet.features + row.columns[i];
    for axes in axes(scene.mesh) {
        let of_row = |row: &&Row, ranks: &[usize]| ranks.contains(&row.rank);
        let groups: Vec<Vec<&Row>> = replicas
            .iter()
            .flat_map(|rows| {
                let ranks = |row: &&Row| group(scene.mesh, row.rank, &axes);
                let firsts = rows.iter().filter(move |row| ranks(row)[0] == row.rank);
                firsts.map(move |row| {
                    rows.iter()
                        .filter(|other| of_row(other, &ranks(row)))
                        .copied()
                        .collect()
                })
            })
            .collect();
        let ranks_of_sum = size(scene.mesh, &axes);
        if groups.is_empty() || groups.iter().any(|rows| rows.len() != ranks_of_sum) {
            continue;
        }
        let repeats = (ranks_of_sum - 1) as f64;
        let fits = |stream: Option<&Vec<f64>>, bias: Option<&Vec<f64>>| {
            groups.iter().all(|rows| {
                let sum = |i: usize| {
                    let stream = stream.map_or(0.0, |stream| stream[index(rows[0], i)]);
                    let bias = bias.map_or(0.0, |bias| bias[rows[0].columns[i]]);
                    stream + rows.iter().map(|row| row.found[i] - stream).sum::<f64>() - repeats * bias
                };
                let sum: Vec<f64> = (0..rows[0].found.len()).map(sum).collect();
                sheet.alike(&sum, &rows[0].truth)
            })
        };
        for stream in std::iter::once(None).chain(streams.iter().map(Some)) {
            for bias in std::iter::once(None).chain(biases.iter().map(Some)) {
                if !fits(stream.map(|(_, stream)| stream), bias.map(|(_, bias)| &bias.elements)) {
                    continue;
                }
                let added = stream.map(|(name, _)| format!(" of what was added to output {name:?}"));
                let less = bias.map(|(path, _)| format!(", less {repeats} times {path:?},"));
                let evidence = format!(
                    "ranks {ranks:?} should have the same values, and differ; the sum over {}{}{} is right",
                    names(&axes),
                    added.unwrap_or_default(),
                    less.unwrap_or_default()
                );
                return Some(Finding::new(FaultKind::MissingSum, evidence));
            }
        }
    }
    None
}

/// The first ranks that should hold the same values and do not.
fn apart(sheet: &Sheet, replicas: &[Vec<&Row>]) -> Option<Vec<usize>> {
    let differ = |rows: &&Vec<&Row>| rows.iter().any(|row| !sheet.alike(&row.found, &rows[0].found));
    let rows = replicas.iter().find(differ)?;
    Some(rows.iter().map(|row| row.rank).collect())
}

/// Ranks that should hold the same values do not, and no sum over them is right.
pub(super) fn not_alike(sheet: &Sheet) -> Option<Finding> {
    let ranks = apart(sheet, &sheet.replicas())?;
    let evidence = format!(
        "ranks {ranks:?} should have the same values, and differ; no sum over them is right, nor one of what was added to an earlier \
         output"
    );
    Some(Finding::new(FaultKind::Unknown, evidence))
}
