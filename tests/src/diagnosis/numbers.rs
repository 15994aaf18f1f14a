//! What makes a hypothesis fit.

use std::collections::BTreeSet;

use burn_sp::layout::{Axis, MeshShape};

use crate::Entry;

/// How far a quantity is off, and how far it may be.
#[derive(Clone, Copy)]
pub(super) struct Noise {
    pub error: f64,
    pub allowed: f64,
}

impl Noise {
    pub fn of(entry: &Entry) -> Self {
        Self {
            error: entry.error,
            allowed: entry.allowed,
        }
    }

    pub fn larger(self, other: Self) -> Self {
        Self {
            error: self.error.max(other.error),
            allowed: self.allowed.max(other.allowed),
        }
    }

    /// Whether what a hypothesis leaves over is rounding, of numbers `scale` times as large, and little of what was to be
    /// explained.
    pub fn explains(&self, residual: f64, scale: f64) -> bool {
        residual <= 4.0 * scale.max(1.0) * self.allowed && residual <= 0.2 * self.error
    }
}

/// Root mean square difference.
pub(super) fn off(a: &[f64], b: &[f64]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    (squares / a.len().max(1) as f64).sqrt()
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Whether both have the same elements, in any order, up to a tolerance.
pub(super) fn same_multiset(a: &[f64], b: &[f64], tolerance: f64) -> bool {
    let sorted = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values
    };
    a.len() == b.len() && sorted(a).iter().zip(sorted(b)).all(|(a, b)| (a - b).abs() <= tolerance)
}

/// A number of ranks, or one over it, by which a quantity could be off; with all sets of axes that have so many.
#[derive(Clone, Debug)]
pub(super) struct Factor {
    pub value: f64,
    pub axes: String,
}

/// The factor between found and right numbers, if it is one of the mesh.
pub(super) fn factor(mesh: MeshShape, found: &[f64], truth: &[f64], noise: Noise) -> Option<Factor> {
    let fits = |value: &f64| {
        let scaled: Vec<f64> = truth.iter().map(|x| value * x).collect();
        noise.explains(off(found, &scaled), *value)
    };
    let sizes: BTreeSet<usize> = axes(mesh).iter().map(|axes| size(mesh, axes)).collect();
    sizes.into_iter().find_map(|ranks| {
        let value = [ranks as f64, (ranks as f64).recip()].into_iter().find(fits)?;
        let same = axes(mesh).into_iter().filter(|axes| size(mesh, axes) == ranks);
        let axes = same.map(|axes| names(&axes)).collect::<Vec<_>>().join(", or of ");
        Some(Factor { value, axes })
    })
}

/// The ranks that differ on these axes.
pub(super) fn size(mesh: MeshShape, axes: &[Axis]) -> usize {
    axes.iter().map(|axis| mesh.size(*axis)).product()
}

/// Every set of axes with more than one rank.
pub(super) fn axes(mesh: MeshShape) -> Vec<Vec<Axis>> {
    let used: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| mesh.size(*axis) > 1).collect();
    (1..1usize << used.len())
        .map(|set| {
            (0..used.len())
                .filter(|bit| set >> bit & 1 == 1)
                .map(|bit| used[bit])
                .collect()
        })
        .collect()
}

pub(super) fn names(axes: &[Axis]) -> String {
    axes.iter().map(|axis| axis.name()).collect::<Vec<_>>().join(" and ")
}

/// The ranks that differ from this one on these axes only, it included; `tp` varies fastest.
pub(super) fn group(mesh: MeshShape, rank: usize, axes: &[Axis]) -> Vec<usize> {
    let coordinate = |rank: usize, axis: Axis| {
        let inner = Axis::ALL
            .iter()
            .filter(|other| **other > axis)
            .map(|other| mesh.size(*other));
        rank / inner.product::<usize>() % mesh.size(axis)
    };
    (0..mesh.ranks())
        .filter(|other| {
            let same = |axis: &Axis| axes.contains(axis) || coordinate(*other, *axis) == coordinate(rank, *axis);
            Axis::ALL.iter().all(same)
        })
        .collect()
}

/// The weights with which terms add up to a target, by least squares; none if the terms are not independent.
pub(super) fn weights(terms: &[Vec<f64>], target: &[f64]) -> Option<Vec<f64>> {
    let n = terms.len();
    let mut rows: Vec<Vec<f64>> = terms
        .iter()
        .map(|a| terms.iter().map(|b| dot(a, b)).chain([dot(a, target)]).collect())
        .collect();
    let scale = rows.iter().enumerate().map(|(i, row)| row[i]).fold(0.0, f64::max);
    for pivot in 0..n {
        let best = (pivot..n).max_by(|a, b| rows[*a][pivot].abs().total_cmp(&rows[*b][pivot].abs()))?;
        rows.swap(pivot, best);
        let size = rows[pivot][pivot].abs();
        if size.is_nan() || size <= 1e-9 * scale {
            return None;
        }
        for other in (0..n).filter(|other| *other != pivot) {
            let share = rows[other][pivot] / rows[pivot][pivot];
            let row = rows[pivot].clone();
            for (x, y) in rows[other].iter_mut().zip(row) {
                *x -= share * y;
            }
        }
    }
    Some((0..n).map(|i| rows[i][n] / rows[i][i]).collect())
}
