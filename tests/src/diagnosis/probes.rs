//! Changes single tokens and looks who notices.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::changes::{Change, Point, rerun, token_inputs};
use super::numbers::off;
use super::sheet::{Row, Sheet, joined, whole};
use super::{FaultKind, Finding, Scene};
use crate::outcome::Piece;
use crate::run::Run;

/// At most so many tokens are changed.
const POINTS: usize = 24;
/// An effect counts if it is this share of the largest.
const STRONG: f64 = 1e-3;
/// An effect is missing if it is below this share of what it should be.
const GONE: f64 = 1e-2;

/// An input with tokens, and the numbers of one output with and without ranks.
pub(super) struct Probes<'a> {
    scene: &'a Scene<'a>,
    name: &'a str,
    pub input: &'a str,
    tokens: usize,
    features: usize,
    /// The ranks that hold a token.
    owners: BTreeMap<Point, BTreeSet<usize>>,
    /// All ranks, those that are off last: where several have a token, theirs counts.
    order: Vec<usize>,
    single: Vec<f64>,
    sharded: Vec<f64>,
    threshold: f64,
}

/// The whole output without and with ranks.
type Wholes = [Vec<f64>; 2];

/// How much a change changes each token, without and with ranks.
struct Effect {
    points: Vec<Point>,
    single: Vec<f64>,
    sharded: Vec<f64>,
}

impl<'a> Probes<'a> {
    /// None if no input has the output's tokens and changes it.
    pub fn of_output(scene: &'a Scene<'a>, name: &'a str, sheet: &Sheet) -> Option<Self> {
        let piece = scene.truth.output(name)?;
        let mut owners: BTreeMap<Point, BTreeSet<usize>> = BTreeMap::new();
        for row in &sheet.rows {
            owners.entry((row.sample, row.token)).or_default().insert(row.rank);
        }
        let off: BTreeSet<usize> = sheet.wrong().iter().map(|row| row.rank).collect();
        let mut order: Vec<usize> = (0..scene.ranks.len()).collect();
        order.sort_by_key(|rank| off.contains(rank));
        let mut probes = Self {
            scene,
            name,
            input: "",
            tokens: piece.shape[1],
            features: sheet.features,
            owners,
            single: whole(piece),
            sharded: whole_output(scene.ranks, name, &order)?,
            order,
            threshold: sheet.threshold,
        };
        probes.input = token_inputs(scene, piece).into_iter().find(|input| {
            probes.input = input;
            let effect = probes.effect(&[(0, 0)]);
            effect.is_some_and(|effect| effect.single.iter().any(|change| *change > probes.threshold))
        })?;
        Some(probes)
    }

    pub fn find(&self) -> Option<Finding> {
        let points = self.points();
        let effects: Vec<Effect> = points.iter().map_while(|point| self.effect(&[*point])).collect();
        self.unseen(&effects).or_else(|| self.swapped())
    }

    /// Where runs of consecutive tokens start and end, of each rank's first sample; those of all ranks in turn.
    fn points(&self) -> Vec<Point> {
        let pieces = self.scene.ranks.iter().filter_map(|run| run.output(self.name));
        let of_rank = |piece: &Piece| -> Vec<Point> {
            let ends = slices(&piece.positions[1])
                .into_iter()
                .flat_map(|(start, end)| [start, end - 1]);
            let samples = piece.positions[0].iter().take(1);
            samples
                .flat_map(|sample| ends.clone().map(move |token| (*sample, token)))
                .collect()
        };
        let of_ranks: Vec<Vec<Point>> = pieces.map(of_rank).collect();
        let most = of_ranks.iter().map(Vec::len).max().unwrap_or(0);
        let mut points: Vec<Point> = Vec::new();
        for point in (0..most).flat_map(|turn| of_ranks.iter().filter_map(move |points| points.get(turn))) {
            if !points.contains(point) {
                points.push(*point);
            }
        }
        points.truncate(POINTS.max(of_ranks.len()));
        points
    }

    /// Whether the wrong elements of some wrong tokens are the same ones if these tokens are others.
    pub fn same_elements(&self, wrong: &[&Row]) -> bool {
        let points: BTreeSet<Point> = wrong.iter().map(|row| (row.sample, row.token)).take(8).collect();
        let points = Vec::from_iter(points);
        let Some([single, sharded]) = self.change(&points, Change::Other) else {
            return false;
        };
        let off = |single: &[f64], sharded: &[f64], at: usize| (single[at] - sharded[at]).abs() > self.threshold;
        let (mut both, mut either) = (0, 0);
        for at in points.iter().flat_map(|point| self.row(*point)) {
            let (before, after) = (off(&self.single, &self.sharded, at), off(&single, &sharded, at));
            both += usize::from(before && after);
            either += usize::from(before || after);
        }
        either > 0 && 10 * both >= 9 * either
    }

    /// Whether tokens see others than they should.
    fn unseen(&self, effects: &[Effect]) -> Option<Finding> {
        let (mut missing, mut extra): (Vec<[Point; 2]>, Vec<[Point; 2]>) = (Vec::new(), Vec::new());
        for effect in effects {
            let strong = STRONG * effect.single.iter().copied().fold(0.0, f64::max);
            let from = effect.points[0];
            for (at, (single, sharded)) in effect.single.iter().zip(&effect.sharded).enumerate() {
                let to = (at / self.tokens, at % self.tokens);
                if *single > strong && *sharded < GONE * single {
                    missing.push([from, to]);
                } else if *sharded > strong && *single < GONE * sharded {
                    extra.push([from, to]);
                }
            }
        }
        let pair = |[from, to]: &[Point; 2]| format!("token {} of sample {} for token {}", from.1, from.0, to.1);
        let (lost, seen) = (missing.first(), extra.first());
        if let Some((token, place)) = self.elsewhere(effects) {
            let evidence = format!(
                "single tokens of input {:?} were changed: of token {token}, it is place {place} that changes most",
                self.input
            );
            return Some(Finding::new(FaultKind::Layout, evidence));
        }
        let apart = |[from, to]: &[Point; 2]| self.owners[from].is_disjoint(&self.owners[to]);
        let seen = seen.map(|seen| format!("; and {} matters, which it should not", pair(seen)));
        match (lost, seen) {
            (Some(lost), None) if missing.iter().all(apart) => {
                let mut blind: BTreeMap<&BTreeSet<usize>, BTreeSet<usize>> = BTreeMap::new();
                for [from, to] in &missing {
                    blind.entry(&self.owners[to]).or_default().extend(&self.owners[from]);
                }
                let blind = blind
                    .iter()
                    .map(|(to, from)| format!("those of ranks {} are not seen by ranks {}", list(from), list(to)));
                Some(Finding::new(
                    FaultKind::LocalTokens,
                    format!(
                        "single tokens of input {:?} were changed: {} ({} effects are missing, such as {})",
                        self.input,
                        blind.collect::<Vec<_>>().join(", "),
                        missing.len(),
                        pair(lost)
                    ),
                ))
            }
            (Some(lost), seen) => Some(Finding::new(
                FaultKind::LocalMask,
                format!(
                    "single tokens of input {:?} were changed: {} effects are missing, such as {}{}",
                    self.input,
                    missing.len(),
                    pair(lost),
                    seen.unwrap_or_default()
                ),
            )),
            (None, Some(_)) => Some(Finding::new(
                FaultKind::LocalMask,
                format!(
                    "single tokens of input {:?} were changed: {} effects should not be, such as {}",
                    self.input,
                    extra.len(),
                    pair(&extra[0])
                ),
            )),
            (None, None) => None,
        }
    }

    /// Whether some token does not change in its own place, but another one does: it is not where it is said to be. Where that was
    /// right in an output before, it is the mask that hides a token from itself.
    fn elsewhere(&self, effects: &[Effect]) -> Option<(usize, usize)> {
        let first = self.scene.truth.outputs.first()?;
        if first.name != self.name {
            return None;
        }
        effects.iter().find_map(|effect| {
            let (sample, token) = effect.points[0];
            let own = sample * self.tokens + token;
            let place = (0..effect.sharded.len()).max_by(|a, b| effect.sharded[*a].total_cmp(&effect.sharded[*b]))?;
            let moved =
                effect.sharded[own] < GONE * effect.single[own] && effect.sharded[place] > 0.3 * effect.single[own];
            moved.then_some((token, place % self.tokens))
        })
    }

    /// Whether two tokens at the same place of two ranks can be exchanged and no third one notices: they have the same position.
    fn swapped(&self) -> Option<Finding> {
        let pieces: Option<Vec<&Piece>> = self.scene.ranks.iter().map(|run| run.output(self.name)).collect();
        let places: Vec<&Vec<Vec<usize>>> = pieces?.into_iter().map(|piece| &piece.positions).collect();
        for (rank, there) in places.iter().enumerate() {
            let Some(sample) = there[0].first() else { continue };
            let first = places.iter().position(|other| other[0].first() == Some(sample))?;
            let here = places[first];
            for (a, b) in here[1].iter().zip(&there[1]).filter(|(a, b)| a != b).take(3) {
                let points = [(*sample, *a), (*sample, *b)];
                let after = self.change(&points, Change::Swap)?;
                if self.exchanged(points, &after) || self.unnoticed(&self.compared(&points, &after)) {
                    let evidence = format!(
                        "every token sees the tokens that it should, but tokens {a} and {b}, which stand at the same place of ranks \
                         {first} and {rank}, can be exchanged as if they had the same position"
                    );
                    return Some(Finding::new(FaultKind::LocalPositions, evidence));
                }
            }
        }
        None
    }

    /// Each now has exactly what the other had, and on one rank it has not.
    fn exchanged(&self, [a, b]: [Point; 2], [single, sharded]: &Wholes) -> bool {
        // What dropout made 0 was dropped for its place, not for its value.
        let apart = |before: &[f64], x: Point, after: &[f64], y: Point| {
            let rows = before[self.row(x)].iter().zip(&after[self.row(y)]);
            let kept = rows.filter(|(before, after)| **before != 0.0 && **after != 0.0);
            let (before, after): (Vec<f64>, Vec<f64>) = kept.unzip();
            if before.is_empty() {
                f64::INFINITY
            } else {
                off(&before, &after)
            }
        };
        let same = |before: &[f64], after: &[f64]| {
            apart(before, a, after, b) < self.threshold && apart(before, b, after, a) < self.threshold
        };
        same(&self.sharded, sharded) && !same(&self.single, single)
    }

    /// Some third token should notice, and does not.
    fn unnoticed(&self, effect: &Effect) -> bool {
        let others = |at: &usize| !effect.points.contains(&(at / self.tokens, at % self.tokens));
        let largest = effect.single.iter().copied().fold(0.0, f64::max);
        (0..effect.single.len()).filter(others).any(|at| {
            effect.single[at] > (STRONG * largest).max(self.threshold) && effect.sharded[at] < GONE * effect.single[at]
        })
    }

    fn row(&self, (sample, token): Point) -> Range<usize> {
        let start = (sample * self.tokens + token) * self.features;
        start..start + self.features
    }

    /// None if a run fails.
    fn effect(&self, points: &[Point]) -> Option<Effect> {
        let after = self.change(points, Change::Other)?;
        Some(self.compared(points, &after))
    }

    /// None if a run fails.
    fn change(&self, points: &[Point], change: Change) -> Option<Wholes> {
        let [single, sharded] = rerun(self.scene, self.input, points, change)?;
        Some([
            whole_output(&single, self.name, &[0])?,
            whole_output(&sharded, self.name, &self.order)?,
        ])
    }

    fn compared(&self, points: &[Point], [single, sharded]: &Wholes) -> Effect {
        let rows = |before: &[f64], after: &[f64]| {
            let rows = before.chunks(self.features).zip(after.chunks(self.features));
            rows.map(|(before, after)| off(before, after)).collect::<Vec<_>>()
        };
        Effect {
            points: points.to_vec(),
            single: rows(&self.single, single),
            sharded: rows(&self.sharded, sharded),
        }
    }
}

/// First and last plus one of each run of consecutive positions.
pub(super) fn slices(positions: &[usize]) -> Vec<(usize, usize)> {
    let mut slices: Vec<(usize, usize)> = Vec::new();
    for position in positions {
        match slices.last_mut() {
            Some((_, end)) if *end == *position => *end += 1,
            _ => slices.push((*position, *position + 1)),
        }
    }
    slices
}

fn whole_output(runs: &[Run], name: &str, order: &[usize]) -> Option<Vec<f64>> {
    let pieces: Option<Vec<&Piece>> = order.iter().map(|rank| runs[*rank].output(name)).collect();
    Some(joined(pieces?))
}

fn list(ranks: &BTreeSet<usize>) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}
