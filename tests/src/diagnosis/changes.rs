//! Runs the closure again with other inputs.

use std::ops::Range;

use burn::tensor::TensorData;
use burn_sp::layout::MeshShape;

use super::Scene;
use crate::outcome::{Inputs, Piece};
use crate::run::{Detail, Run};

/// A sample and a token.
pub(super) type Point = (usize, usize);

#[derive(Clone, Copy)]
pub(super) enum Change {
    /// Each of the tokens becomes another.
    Other,
    /// Two tokens change places.
    Swap,
}

/// The closure on one rank and on all, with an input changed; only outputs and losses count.
pub(super) fn rerun(scene: &Scene<'_>, input: &str, points: &[Point], change: Change) -> Option<[Vec<Run>; 2]> {
    let mut inputs: Inputs = scene.inputs.clone();
    let data = inputs.get_mut(input)?;
    *data = changed(data, points, change);
    let run = |mesh| scene.run(mesh, &inputs, Detail::Forward);
    Some([run(MeshShape::default())?, run(scene.mesh)?])
}

/// The closure on one rank and on all, of sequences without their last tokens; only outputs and losses count. Not every closure can
/// do that: one that cannot may do the others.
pub(super) fn truncated(scene: &Scene<'_>, names: &[&str], last: usize) -> Option<[Vec<Run>; 2]> {
    let mut inputs: Inputs = scene.inputs.clone();
    for (_, data) in inputs.iter_mut().filter(|(name, _)| names.contains(&name.as_str())) {
        *data = without_last(data, last);
    }
    let run = |mesh| scene.again.run(mesh, &inputs, Detail::Forward).ok();
    Some([run(MeshShape::default())?, run(scene.mesh)?])
}

/// The inputs `[batch, tokens, ...]` that could be those of an output: with as many tokens. If ranks share its dim 1, so that this
/// is known to be that of the tokens, also with more: the last of them, say, are labels only.
pub(super) fn token_inputs<'a>(scene: &Scene<'a>, output: &Piece) -> Vec<&'a str> {
    let tokens = output.shape[1];
    let pieces = scene.ranks.iter().filter_map(|run| run.output(&output.name));
    let shared = pieces.into_iter().any(|piece| piece.positions[1].len() < tokens);
    let fits = |data: &TensorData| {
        let shape = data.shape();
        let long = shape.len() >= 2 && (shape[1] == tokens || shared && shape[1] > tokens);
        long && shape[0] == output.shape[0]
    };
    let inputs: &'a Inputs = scene.inputs;
    inputs
        .iter()
        .filter(|(_, data)| fits(data))
        .map(|(name, _)| name.as_str())
        .collect()
}

fn without_last(data: &TensorData, last: usize) -> TensorData {
    let mut shape = data.shape().to_vec();
    let width: usize = shape[1..].iter().product();
    let kept = width / shape[1] * (shape[1] - last);
    shape[1] -= last;
    let dtype = data.dtype();
    let data = if dtype.is_float() {
        let values: Vec<f64> = data.iter::<f64>().collect();
        let rows = values.chunks(width).flat_map(|row| &row[..kept]);
        TensorData::new(rows.copied().collect(), shape)
    } else {
        let values: Vec<i64> = data.iter::<i64>().collect();
        let rows = values.chunks(width).flat_map(|row| &row[..kept]);
        TensorData::new(rows.copied().collect(), shape)
    };
    data.convert_dtype(dtype)
}

fn changed(data: &TensorData, points: &[Point], change: Change) -> TensorData {
    let shape = data.shape().to_vec();
    let width: usize = shape[2..].iter().product();
    let rows = |(sample, token): Point| (sample * shape[1] + token) * width..(sample * shape[1] + token + 1) * width;
    let dtype = data.dtype();
    let data = if dtype.is_float() {
        let mut values: Vec<f64> = data.iter::<f64>().collect();
        // Not a shift or a factor, to which a norm is blind.
        alter(&mut values, points, change, rows, |_, at, x| {
            -x + 0.5 * (1 - 2 * (at as i64 % 2)) as f64
        });
        TensorData::new(values, shape.clone())
    } else {
        let mut values: Vec<i64> = data.iter::<i64>().collect();
        alter(&mut values, points, change, rows, |all, _, x| {
            all.iter().copied().find(|other| *other != x).unwrap_or(x)
        });
        TensorData::new(values, shape.clone())
    };
    data.convert_dtype(dtype)
}

fn alter<T: Copy>(
    values: &mut [T],
    points: &[Point],
    change: Change,
    rows: impl Fn(Point) -> Range<usize>,
    other: impl Fn(&[T], usize, T) -> T,
) {
    match (change, points) {
        (Change::Swap, [a, b]) => {
            for (a, b) in rows(*a).zip(rows(*b)) {
                values.swap(a, b);
            }
        }
        _ => {
            let before = values.to_vec();
            for at in points.iter().flat_map(|point| rows(*point)) {
                values[at] = other(&before, at, before[at]);
            }
        }
    }
}
