//! Counting the traffic.

use crate::Collective;
use crate::plan::{Run, gathered};
use serde::{Deserialize, Serialize};

/// What one rank sent with one operation under one axis label.
///
/// `bytes_sent` is the payload that leaves the rank, whatever route the engine takes: an all-gather to a whole of n
/// bytes on P equal ranks counts n(P-1)/P in total for the slices it sends, a reduce-scatter of n the same, an
/// all-reduce 2n(P-1)/P, a shift n, a broadcast n(P-1) on its root. A group of one rank counts nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counter {
    /// The global rank.
    pub rank: usize,
    /// The operation, see [`Collective::name`](crate::Collective::name).
    pub op: String,
    /// The label of the group, see [`Communicator::axis`](crate::Communicator::axis).
    pub axis: String,
    /// How many calls; tensors packed into one call count once.
    pub calls: u64,
    /// Payload that left the rank, in bytes.
    pub bytes_sent: u64,
    /// Time spent inside `start` and `wait`, in seconds: waiting for others included, compute between the two excluded.
    pub seconds: f64,
}

/// The number of elements of `rank`'s input of `shape` that leave the rank: what others' plans take from it.
///
/// Closed forms of the sum over the others' tiles; an all-reduce counts as reduce-scatter and all-gather of equal
/// parts. The arguments must have passed [`Plan::new`].
pub(crate) fn elements_sent(op: &Collective, size: usize, rank: usize, shape: &[usize]) -> usize {
    let elements: usize = shape.iter().product();
    // Of a slice through the tensor at one index of `dim`.
    let slice = |dim: usize| {
        shape
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != dim)
            .map(|(_, len)| len)
            .product::<usize>()
    };
    let others = || (0..size).filter(|&other| other != rank);
    match op {
        Collective::AllGather { dim, parts } => {
            let first = |run: &&Run| run.sources.first().is_some_and(|source| source.0 == rank);
            let brought: usize = gathered(parts)
                .iter()
                .flatten()
                .filter(first)
                .map(|run| run.length)
                .sum();
            brought * slice(*dim) * (size - 1)
        }
        Collective::ReduceScatter { dim, parts } => {
            others().map(|other| parts.len_of(other)).sum::<usize>() * slice(*dim)
        }
        Collective::AllReduce => 2 * elements * (size - 1) / size,
        Collective::AllToAll {
            gather_dim,
            gather_parts,
            scatter_dim,
            scatter_parts,
        } if gather_dim == scatter_dim => {
            let meet = |a: &std::ops::Range<usize>, b: &std::ops::Range<usize>| {
                b.end.min(a.end).saturating_sub(b.start.max(a.start))
            };
            let wanted = others().flat_map(|other| scatter_parts.of(other));
            let length: usize = wanted
                .map(|w| gather_parts.of(rank).iter().map(|own| meet(own, w)).sum::<usize>())
                .sum();
            length * slice(*gather_dim)
        }
        Collective::AllToAll {
            scatter_dim,
            scatter_parts,
            ..
        } => others().map(|other| scatter_parts.len_of(other)).sum::<usize>() * slice(*scatter_dim),
        Collective::Shift { .. } if op.sender(rank, size) == Some(rank) => 0,
        Collective::Shift { .. } => elements,
        Collective::Broadcast { root } if *root == rank => elements * (size - 1),
        Collective::Broadcast { .. } | Collective::Barrier => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Parts, Plan};

    /// The closed forms against the table they stand for.
    #[test]
    fn sent_is_what_others_take() {
        let splits = [
            Parts::contiguous(7, 3),
            Parts::new(vec![vec![0..1, 6..7], vec![1..3, 5..6], vec![3..5]]),
            Parts::new(vec![vec![], vec![3..7, 0..3], vec![]]),
            Parts::new(vec![vec![0..4], vec![2..7], vec![2..7, 0..1]]),
        ];
        let mut ops = vec![
            Collective::Shift { by: 1 },
            Collective::Shift { by: -3 },
            Collective::Broadcast { root: 1 },
        ];
        for a in &splits {
            ops.push(Collective::AllGather {
                dim: 1,
                parts: a.clone(),
            });
            ops.push(Collective::ReduceScatter {
                dim: 1,
                parts: a.clone(),
            });
            for b in &splits {
                for scatter_dim in [0, 1] {
                    let (gather_parts, scatter_parts) = (a.clone(), b.clone());
                    ops.push(Collective::AllToAll {
                        gather_dim: 1,
                        gather_parts,
                        scatter_dim,
                        scatter_parts,
                    });
                }
            }
        }
        for op in ops {
            let shape = |rank: usize| match &op {
                Collective::AllGather { parts, .. } => vec![7, parts.len_of(rank), 2],
                Collective::AllToAll { gather_parts, .. } => vec![7, gather_parts.len_of(rank), 2],
                _ => vec![7, 7, 2],
            };
            for me in 0..3 {
                let mut taken = 0;
                for other in (0..3).filter(|&other| other != me) {
                    let plan = Plan::new(&op, 3, other, &shape(other)).unwrap();
                    for tile in &plan.tiles {
                        let from_me = tile.sources.iter().filter(|source| source.rank == me).count();
                        taken += from_me * tile.shape.iter().product::<usize>();
                    }
                }
                assert_eq!(elements_sent(&op, 3, me, &shape(me)), taken, "{op:?} rank {me}");
            }
        }
    }
}
