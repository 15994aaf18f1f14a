//! A collective as a table: which box of which rank goes where.
//!
//! [`Plan::new`] depends on nothing but the operation, the shape and the rank, so an engine that sends messages
//! computes from the same table what it sends (the tiles of others that name it as a source) as what it receives.

use crate::{Collective, Parts};

/// How one rank's result of a collective comes about.
///
/// The tiles do not overlap and together they cover the result: an engine that writes every tile has written every
/// element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The shape of the result, in elements.
    pub shape: Vec<usize>,
    /// The boxes of which the result consists.
    pub tiles: Vec<Tile>,
}

/// One box of a result. It is the sum of its sources, in their order; mostly there is only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Where the box starts in the result, in elements along every dimension.
    pub start: Vec<usize>,
    /// The size of the box, here and in every source, in elements along every dimension.
    pub shape: Vec<usize>,
    /// The boxes to add up; never empty.
    pub sources: Vec<Source>,
}

/// A box of a rank's input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The rank within the group.
    pub rank: usize,
    /// Where the box starts in that rank's input, in elements along every dimension.
    pub start: Vec<usize>,
}

/// A tile's extent in one dimension: place in the result, length, and per source (rank, place in its input).
#[derive(Clone)]
pub(crate) struct Run {
    pub start: usize,
    pub length: usize,
    pub sources: Vec<(usize, usize)>,
}

impl Plan {
    /// The plan of `rank` in a group of `size`, for an input of `shape`.
    ///
    /// For the operations that hand a tensor over ([`Collective::sender`]), `shape` is that of the sender's tensor.
    ///
    /// # Errors
    /// In words, what about the operation or the shape cannot work.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn new(op: &Collective, size: usize, rank: usize, shape: &[usize]) -> Result<Plan, String> {
        match op {
            Collective::AllGather { dim, parts } => {
                check_parts(parts, size)?;
                check_length(shape, *dim, parts.len_of(rank), "this rank's part")?;
                let mut runs = gathered(parts)?;
                // Copies of one index are equal by contract, so any would do; the first is the same on all ranks.
                runs.iter_mut().for_each(|run| run.sources.truncate(1));
                Ok(Plan::along(shape, *dim, merged(runs)))
            }
            Collective::ReduceScatter { dim, parts } => {
                check_parts(parts, size)?;
                check_length(shape, *dim, parts.extent(), "the whole that the parts describe")?;
                let mut start = 0;
                let own = parts.of(rank).iter().map(|range| {
                    let sources = (0..size).map(|source| (source, range.start)).collect();
                    let run = Run {
                        start,
                        length: range.len(),
                        sources,
                    };
                    start += range.len();
                    run
                });
                Ok(Plan::along(shape, *dim, merged(own.collect())))
            }
            Collective::AllReduce => Ok(Plan::whole(shape, 0..size)),
            Collective::AllToAll {
                gather_dim,
                gather_parts,
                scatter_dim,
                scatter_parts,
            } => {
                check_parts(gather_parts, size)?;
                check_parts(scatter_parts, size)?;
                check_length(shape, *gather_dim, gather_parts.len_of(rank), "this rank's part")?;
                let gathered = merged(gathered(gather_parts)?);
                if gather_dim == scatter_dim {
                    if scatter_parts.extent() > gather_parts.extent() {
                        let (new, old) = (scatter_parts.extent(), gather_parts.extent());
                        return Err(format!("the new parts reach to {new}, the old ones only to {old}"));
                    }
                    return Ok(Plan::along(
                        shape,
                        *gather_dim,
                        merged(resplit(&gathered, scatter_parts, rank)),
                    ));
                }
                check_length(
                    shape,
                    *scatter_dim,
                    scatter_parts.extent(),
                    "the whole that the parts describe",
                )?;
                let mut plan = Plan::along(shape, *gather_dim, gathered);
                plan.scatter(*scatter_dim, scatter_parts, rank);
                Ok(plan)
            }
            Collective::Broadcast { root } if *root >= size => {
                Err(format!("root {root} is not one of the {size} ranks"))
            }
            Collective::Shift { .. } | Collective::Broadcast { .. } | Collective::Barrier => {
                Ok(Plan::whole(shape, op.sender(rank, size)))
            }
        }
    }

    /// All of `shape`, as one tile.
    fn whole(shape: &[usize], ranks: impl IntoIterator<Item = usize>) -> Plan {
        let origin = vec![0; shape.len()];
        let sources = ranks
            .into_iter()
            .map(|rank| Source {
                rank,
                start: origin.clone(),
            })
            .collect();
        Plan {
            shape: shape.to_vec(),
            tiles: vec![Tile {
                start: origin,
                shape: shape.to_vec(),
                sources,
            }],
        }
    }

    /// One tile a run of `dim`, whole in all other dimensions.
    fn along(shape: &[usize], dim: usize, runs: Vec<Run>) -> Plan {
        let at = |place: usize| {
            let mut start = vec![0; shape.len()];
            start[dim] = place;
            start
        };
        let mut whole = shape.to_vec();
        whole[dim] = runs.iter().map(|run| run.length).sum();
        let tile = |run: Run| {
            let mut shape = shape.to_vec();
            shape[dim] = run.length;
            let sources = run
                .sources
                .iter()
                .map(|&(rank, start)| Source { rank, start: at(start) })
                .collect();
            Tile {
                start: at(run.start),
                shape,
                sources,
            }
        };
        Plan {
            shape: whole,
            tiles: runs.into_iter().map(tile).collect(),
        }
    }

    /// Keeps only `rank`'s part of `dim`, which is whole in every source.
    fn scatter(&mut self, dim: usize, parts: &Parts, rank: usize) {
        let mut tiles = Vec::new();
        let mut local = 0;
        for range in parts.of(rank).iter().filter(|range| !range.is_empty()) {
            for tile in &self.tiles {
                let mut tile = tile.clone();
                tile.start[dim] = local;
                tile.shape[dim] = range.len();
                tile.sources
                    .iter_mut()
                    .for_each(|source| source.start[dim] = range.start);
                tiles.push(tile);
            }
            local += range.len();
        }
        self.shape[dim] = local;
        self.tiles = tiles;
    }

    /// Cuts the tiles, along their outermost dimensions, into ones of at most about `elements` elements.
    #[must_use]
    pub fn cut(self, elements: usize) -> Plan {
        let mut tiles = Vec::new();
        for tile in self.tiles {
            cut_tile(tile, elements.max(1), &mut tiles);
        }
        Plan {
            shape: self.shape,
            tiles,
        }
    }

    /// Whether the result is rank `rank`'s input of `shape`, unchanged.
    pub fn is_copy_of(&self, rank: usize, shape: &[usize]) -> bool {
        let same =
            |tile: &Tile| matches!(&tile.sources[..], [source] if source.rank == rank && source.start == tile.start);
        self.shape == shape && self.tiles.iter().all(same)
    }
}

fn check_parts(parts: &Parts, size: usize) -> Result<(), String> {
    if parts.ranks() != size {
        return Err(format!(
            "the parts are for {} ranks, the group has {size}",
            parts.ranks()
        ));
    }
    let mut ranges = (0..size).flat_map(|rank| parts.of(rank));
    match ranges.find(|range| range.start > range.end) {
        Some(range) => Err(format!("the range {range:?} ends before it starts")),
        None => Ok(()),
    }
}

fn check_length(shape: &[usize], dim: usize, expected: usize, what: &str) -> Result<(), String> {
    match shape.get(dim) {
        None => Err(format!("there is no dim {dim} in shape {shape:?}")),
        Some(&length) if length != expected => Err(format!(
            "dim {dim} of shape {shape:?} has length {length}, but {what} has length {expected}"
        )),
        Some(_) => Ok(()),
    }
}

/// The whole dimension, cut wherever the set of owners changes; per run all owners, in rank order.
pub(crate) fn gathered(parts: &Parts) -> Result<Vec<Run>, String> {
    let ranges = || (0..parts.ranks()).flat_map(|rank| parts.of(rank));
    let mut cuts: Vec<usize> = ranges().flat_map(|range| [range.start, range.end]).chain([0]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let run = |start: usize, end: usize| {
        let mut sources = Vec::new();
        for rank in 0..parts.ranks() {
            let mut local = 0;
            for range in parts.of(rank) {
                if range.start <= start && end <= range.end {
                    sources.push((rank, local + start - range.start));
                }
                local += range.len();
            }
        }
        match sources.is_empty() {
            true => Err(format!(
                "no rank owns {start}..{end} of the dimension that is to become whole"
            )),
            false => Ok(Run {
                start,
                length: end - start,
                sources,
            }),
        }
    };
    cuts.windows(2).map(|pair| run(pair[0], pair[1])).collect()
}

/// `rank`'s part of a dimension of which the runs of the whole are known.
fn resplit(whole: &[Run], parts: &Parts, rank: usize) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut local = 0;
    for range in parts.of(rank) {
        for run in whole {
            let (start, end) = (run.start.max(range.start), (run.start + run.length).min(range.end));
            if start < end {
                let sources = run
                    .sources
                    .iter()
                    .map(|&(rank, at)| (rank, at + start - run.start))
                    .collect();
                runs.push(Run {
                    start: local + start - range.start,
                    length: end - start,
                    sources,
                });
            }
        }
        local += range.len();
    }
    runs
}

/// Joins neighbours that are neighbours in every source too, and drops empty runs: fewer, longer copies.
fn merged(runs: Vec<Run>) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs.into_iter().filter(|run| run.length > 0) {
        if let Some(last) = joined.last_mut() {
            let follows = last.sources.len() == run.sources.len()
                && last
                    .sources
                    .iter()
                    .zip(&run.sources)
                    .all(|(a, b)| a.0 == b.0 && a.1 + last.length == b.1);
            if follows && last.start + last.length == run.start {
                last.length += run.length;
                continue;
            }
        }
        joined.push(run);
    }
    joined
}

fn cut_tile(tile: Tile, most: usize, out: &mut Vec<Tile>) {
    let elements: usize = tile.shape.iter().product();
    let Some(dim) = tile
        .shape
        .iter()
        .position(|&length| length > 1)
        .filter(|_| elements > most)
    else {
        return out.push(tile);
    };
    let length = tile.shape[dim];
    let step = (most / (elements / length)).max(1);
    for from in (0..length).step_by(step) {
        let mut piece = tile.clone();
        piece.start[dim] += from;
        piece.shape[dim] = step.min(length - from);
        piece.sources.iter_mut().for_each(|source| source.start[dim] += from);
        cut_tile(piece, most, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cutting_keeps_the_cover() {
        let plan = Plan::whole(&[3, 5, 7], [0]);
        for most in [1, 4, 7, 8, 20, 35, 36, 200] {
            let cut = plan.clone().cut(most);
            let mut seen = [false; 105];
            for tile in &cut.tiles {
                assert!(tile.shape.iter().product::<usize>() <= most.max(1));
                for (index, seen) in seen.iter_mut().enumerate() {
                    let at = [index / 35, index / 7 % 5, index % 7];
                    if (0..3).all(|d| (tile.start[d]..tile.start[d] + tile.shape[d]).contains(&at[d])) {
                        assert!(!std::mem::replace(seen, true));
                    }
                }
            }
            assert!(seen.iter().all(|seen| *seen));
        }
    }
}
