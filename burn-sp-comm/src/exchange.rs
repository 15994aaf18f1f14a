//! The messages of a call: which boxes of its tensors a rank sends to whom, and which it receives from whom.
//!
//! Both sides read them from the receiver's [`Plan`], so they agree on the boxes, their sizes and their order without
//! a word. Boxes are in the order of the receiver's plan: by transfer, then by tile, then by source.

use crate::{Collective, Plan};

/// The messages of one rank in one call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    /// By rank within the group, the boxes that it needs of this rank's tensors. None to this rank itself.
    pub sends: Vec<Vec<Piece>>,
    /// By rank within the group, where the boxes that it sends belong. None from this rank itself.
    pub receives: Vec<Vec<Place>>,
    /// Where this rank's own boxes belong.
    pub own: Vec<Place>,
}

/// A box of one of this rank's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub transfer: usize,
    pub start: Vec<usize>,
    pub shape: Vec<usize>,
}

/// A term of this rank's results: one source of one tile of one transfer's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub transfer: usize,
    pub tile: usize,
    pub source: usize,
}

impl Exchange {
    /// Of `rank` in a group of `size`, for one operation and input shape a transfer.
    ///
    /// Boxes without elements are among them. Where tensors are handed over ([`Collective::sender`]), a box that comes
    /// in has the sender's shape. An all-reduce sends whole tensors to everyone: see [`all_reduce_steps`].
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn new(transfers: &[(&Collective, &[usize])], size: usize, rank: usize) -> Result<Exchange, String> {
        let mut exchange = Exchange {
            sends: vec![Vec::new(); size],
            receives: vec![Vec::new(); size],
            own: Vec::new(),
        };
        for (transfer, (op, shape)) in transfers.iter().enumerate() {
            for receiver in 0..size {
                let plan = Plan::new(op, size, receiver, &input_shape(op, shape, receiver))?;
                for (tile, part) in plan.tiles.iter().enumerate() {
                    for (source, from) in part.sources.iter().enumerate() {
                        let place = Place { transfer, tile, source };
                        match (receiver == rank, from.rank == rank) {
                            (true, true) => exchange.own.push(place),
                            (true, false) => exchange.receives[from.rank].push(place),
                            (false, true) => exchange.sends[receiver].push(Piece {
                                transfer,
                                start: from.start.clone(),
                                shape: part.shape.clone(),
                            }),
                            (false, false) => {}
                        }
                    }
                }
            }
        }
        Ok(exchange)
    }
}

/// The shape of another rank's input, where this rank's has `shape`.
fn input_shape(op: &Collective, shape: &[usize], rank: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    match op {
        Collective::AllGather { dim, parts }
        | Collective::AllToAll {
            gather_dim: dim,
            gather_parts: parts,
            ..
        } if rank < parts.ranks() && *dim < shape.len() => shape[*dim] = parts.len_of(rank),
        _ => {}
    }
    shape
}

/// An all-reduce of `elements` as messages that send as little as can be: the sums of equal parts of the flat tensor,
/// then everyone gathers them.
pub(crate) fn all_reduce_steps(elements: usize, size: usize) -> [Collective; 2] {
    let parts = crate::Parts::contiguous(elements, size);
    [
        Collective::ReduceScatter {
            dim: 0,
            parts: parts.clone(),
        },
        Collective::AllGather { dim: 0, parts },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Parts;
    use crate::stats::elements_sent;

    fn elements(shape: &[usize]) -> usize {
        shape.iter().product()
    }

    /// Splits of 7 and of 5 over 3 ranks: even, zigzag, in one hand, overlapping.
    fn splits(length: usize) -> [Parts; 4] {
        [
            Parts::contiguous(length, 3),
            Parts::new(vec![
                vec![0..1, length - 1..length],
                vec![1..3, length - 2..length - 1],
                vec![3..length - 2],
            ]),
            Parts::new(vec![vec![], vec![3..length, 0..3], vec![]]),
            Parts::new(vec![vec![0..4], vec![2..length], vec![2..length, 0..1]]),
        ]
    }

    fn operations() -> Vec<Collective> {
        let mut ops = vec![Collective::AllReduce, Collective::Barrier];
        ops.extend([0, 1, -4].map(|by| Collective::Shift { by }));
        ops.extend([0, 2].map(|root| Collective::Broadcast { root }));
        for parts in splits(7) {
            ops.push(Collective::AllGather {
                dim: 1,
                parts: parts.clone(),
            });
            ops.push(Collective::ReduceScatter {
                dim: 1,
                parts: parts.clone(),
            });
            for (scatter_dim, length) in [(1, 7), (2, 5)] {
                ops.extend(splits(length).map(|scatter_parts| Collective::AllToAll {
                    gather_dim: 1,
                    gather_parts: parts.clone(),
                    scatter_dim,
                    scatter_parts,
                }));
            }
        }
        ops
    }

    #[test]
    fn both_sides_see_the_same_boxes_in_the_same_order() {
        for op in operations() {
            let shape = |rank: usize| match &op {
                Collective::Shift { .. } | Collective::Broadcast { .. } => vec![2, rank + 1, 5],
                op => input_shape(op, &[2, 7, 5], rank),
            };
            // Twice in one call, so that the transfers must be told apart.
            let exchange = |rank| {
                let shape = shape(rank);
                Exchange::new(&[(&op, &shape), (&op, &shape)], 3, rank).unwrap()
            };
            for me in 0..3 {
                let mine = exchange(me);
                let plan_from = |sender: usize| {
                    let shape = if op.sender(me, 3).is_some() {
                        shape(sender)
                    } else {
                        shape(me)
                    };
                    Plan::new(&op, 3, me, &shape).unwrap()
                };
                let mut covered = mine.own.clone();
                for other in 0..3 {
                    let (sent, plan) = (&exchange(other).sends[me], plan_from(other));
                    assert_eq!(sent.len(), mine.receives[other].len(), "{op:?}");
                    for (piece, place) in sent.iter().zip(&mine.receives[other]) {
                        let tile = &plan.tiles[place.tile];
                        let source = &tile.sources[place.source];
                        assert_eq!((piece.transfer, &piece.shape), (place.transfer, &tile.shape), "{op:?}");
                        assert_eq!((other, &piece.start), (source.rank, &source.start), "{op:?}");
                    }
                    covered.extend(&mine.receives[other]);
                }
                // Every term of the result comes once.
                covered.sort_unstable();
                let plan = plan_from(op.sender(me, 3).unwrap_or(me));
                let terms = |transfer| {
                    let tiles = plan.tiles.iter().enumerate();
                    tiles.flat_map(move |(tile, part)| {
                        (0..part.sources.len()).map(move |source| Place { transfer, tile, source })
                    })
                };
                assert_eq!(covered, (0..2).flat_map(terms).collect::<Vec<_>>(), "{op:?}");

                if op != Collective::AllReduce {
                    let sent: usize = mine.sends.iter().flatten().map(|piece| elements(&piece.shape)).sum();
                    assert_eq!(sent, 2 * elements_sent(&op, 3, me, &shape(me)), "{op:?} rank {me}");
                }
            }
        }
    }

    #[test]
    fn an_all_reduce_in_two_steps_sends_what_is_counted() {
        for (total, size) in [(24, 4), (7, 3), (2, 5), (0, 2), (1, 1)] {
            let [scatter, gather] = all_reduce_steps(total, size);
            let mut sent = 0;
            for rank in 0..size {
                let own = Parts::contiguous(total, size).len_of(rank);
                for (op, length) in [(&scatter, total), (&gather, own)] {
                    let exchange = Exchange::new(&[(op, &[length])], size, rank).unwrap();
                    sent += exchange
                        .sends
                        .iter()
                        .flatten()
                        .map(|p| elements(&p.shape))
                        .sum::<usize>();
                }
            }
            assert_eq!(sent, 2 * total * (size - 1));
            let counted: usize = (0..size)
                .map(|rank| elements_sent(&Collective::AllReduce, size, rank, &[total]))
                .sum();
            assert!((counted..counted + size).contains(&sent), "{sent} {counted}");
        }
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let parts = Parts::contiguous(4, 2);
        let op = Collective::AllGather { dim: 3, parts };
        assert!(Exchange::new(&[(&op, &[2, 2])], 2, 0).is_err());
        assert!(Exchange::new(&[(&op, &[2, 2])], 3, 2).is_err());
    }
}
