//! An output `[batch, tokens, ...]` as rows, one a token and rank.

use std::collections::BTreeMap;

use burn_sp::layout::{Axis, MeshShape};

use super::numbers::{Noise, group};
use crate::outcome::Piece;
use crate::run::Run;

/// What a rank has of a token.
pub(super) struct Row {
    pub rank: usize,
    pub sample: usize,
    /// The token's global position.
    pub token: usize,
    /// Its place among the rank's tokens.
    pub local: usize,
    /// Whether it is the last of a run of consecutive tokens on its rank.
    pub last: bool,
    /// The features, counted in the whole tensor.
    pub columns: Vec<usize>,
    pub found: Vec<f64>,
    pub truth: Vec<f64>,
}

pub(super) struct Sheet {
    pub rows: Vec<Row>,
    /// Features of a token.
    pub features: usize,
    pub noise: Noise,
    /// Between the errors of right elements and of wrong ones: their geometric mean, so far apart are they.
    pub threshold: f64,
}

impl Sheet {
    /// None if the output has no tokens, or another shape than on one rank.
    pub fn new(ranks: &[Run], truth: &Piece, noise: Noise) -> Option<Self> {
        let [_, _, features @ ..] = truth.shape.as_slice() else {
            return None;
        };
        let features: usize = features.iter().product();
        let expected = whole(truth);
        let mut rows = Vec::new();
        for (rank, run) in ranks.iter().enumerate() {
            let piece = run.output(&truth.name).filter(|piece| piece.shape == truth.shape)?;
            rows.extend(rows_of(rank, piece, features, &expected));
        }
        let errors = rows.iter().flat_map(|row| row.found.iter().zip(&row.truth));
        let worst = errors.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        Some(Self {
            rows,
            features,
            noise,
            threshold: (noise.allowed * worst).sqrt(),
        })
    }

    pub fn is_wrong(&self, found: f64, truth: f64) -> bool {
        let error = (found - truth).abs();
        error.is_nan() || error > self.threshold
    }

    pub fn wrong(&self) -> Vec<&Row> {
        let wrong = |row: &&Row| row.found.iter().zip(&row.truth).any(|(a, b)| self.is_wrong(*a, *b));
        self.rows.iter().filter(wrong).collect()
    }

    /// Whether two rows of numbers are the same.
    pub fn alike(&self, a: &[f64], b: &[f64]) -> bool {
        a.len() == b.len() && !a.iter().zip(b).any(|(a, b)| self.is_wrong(*a, *b))
    }

    /// The rows of the same token and features on different ranks, where several have them.
    pub fn replicas(&self) -> Vec<Vec<&Row>> {
        let mut same: BTreeMap<(usize, usize, &[usize]), Vec<&Row>> = BTreeMap::new();
        for row in &self.rows {
            same.entry((row.sample, row.token, &row.columns)).or_default().push(row);
        }
        same.into_values().filter(|rows| rows.len() > 1).collect()
    }
}

fn rows_of(rank: usize, piece: &Piece, features: usize, expected: &[f64]) -> Vec<Row> {
    let indices = piece.global_indices();
    let tokens = &piece.positions[1];
    let held: usize = piece.positions[2..].iter().map(Vec::len).product();
    if held == 0 {
        return Vec::new();
    }
    let mut rows = Vec::new();
    let all = indices.chunks(held).zip(piece.local.elements.chunks(held));
    for (at, (indices, found)) in all.enumerate() {
        let local = at % tokens.len();
        let token = tokens[local];
        rows.push(Row {
            rank,
            sample: piece.positions[0][at / tokens.len()],
            token,
            local,
            last: tokens.get(local + 1) != Some(&(token + 1)),
            columns: indices.iter().map(|index| index % features).collect(),
            found: found.to_vec(),
            truth: indices.iter().map(|index| expected[*index]).collect(),
        });
    }
    rows
}

/// Whether ranks of ring and ulysses have the same part of every dim of an output but 1: that of the tokens, then.
pub(super) fn tokens_in_dim_1(mesh: MeshShape, ranks: &[Run], name: &str) -> bool {
    let others = |rank: usize| {
        let mut positions = ranks[rank].output(name).map(|piece| piece.positions.clone())?;
        (positions.len() > 1).then(|| drop(positions.remove(1)))?;
        Some(positions)
    };
    (0..ranks.len()).all(|rank| {
        let first = group(mesh, rank, &[Axis::Ring, Axis::Ulysses])[0];
        others(rank).is_some() && others(rank) == others(first)
    })
}

/// The elements of one rank's whole tensor, row-major.
pub(super) fn whole(piece: &Piece) -> Vec<f64> {
    joined([piece])
}

/// The whole tensor from all ranks' parts; where several have an element, the last one's counts.
pub(super) fn joined<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> Vec<f64> {
    let mut whole = Vec::new();
    for piece in pieces {
        whole.resize(piece.shape.iter().product(), 0.0);
        for (index, element) in piece.global_indices().into_iter().zip(&piece.local.elements) {
            whole[index] = *element;
        }
    }
    whole
}
