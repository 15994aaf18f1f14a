//! NCCL played by the ranks of the `threads` engine on tensors in host memory: what the library is asked for gives every
//! collective's result, and moves as much as is counted.

#[path = "../../../tests/common/mod.rs"]
mod common;

use super::calls::{Call, Library, What, carry_out, dense, reduction};
use crate::copy::assemble;
use crate::engines::shared::lock;
use crate::stats::elements_sent;
use crate::{Buffer, Collective, CommError, Communicator, Parts, Plan, Transfer};
use burn_std::{DType, Element, bf16, f16};
use common::{expected, input, local, operations, shape_of};
use std::sync::Mutex;

const SHAPE: [usize; 4] = [3, 7, 5, 2];

/// What the ranks have asked for in the group that is being made.
type Board = Mutex<Vec<Vec<Call>>>;

/// A rank's library.
struct Played<'a> {
    comm: &'a dyn Communicator,
    board: &'a Board,
    /// The calls that were made, and the elements that have left the rank.
    made: Mutex<(Vec<What>, usize)>,
}

impl Library for Played<'_> {
    fn group(&self, calls: Vec<Call>) -> Result<Vec<Option<Buffer>>, CommError> {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        self.note(&calls);
        {
            let mut board = lock(self.board);
            board.resize_with(size, Vec::new);
            board[rank] = calls;
        }
        self.comm.barrier()?;
        let results = {
            let board = lock(self.board);
            let asks = |peer: usize, what: What| board[peer].iter().filter(|call| call.what == what).count();
            (0..size).for_each(|peer| {
                assert_eq!(
                    asks(peer, What::Send { to: rank }),
                    asks(rank, What::Receive { from: peer })
                );
            });
            (0..board[rank].len())
                .map(|place| answer(&board, rank, place))
                .collect()
        };
        // Nobody asks anew before all have read.
        self.comm.barrier()?;
        Ok(results)
    }
}

impl Played<'_> {
    fn note(&self, calls: &[Call]) {
        let others = self.comm.size() - 1;
        let mut made = lock(&self.made);
        for call in calls {
            let read = call.from.as_ref().map_or(0, Buffer::num_elements);
            let written: usize = call.to.as_ref().map_or(0, |(shape, _)| shape.iter().product());
            made.0.push(call.what);
            made.1 += match call.what {
                What::AllGather | What::Broadcast { .. } => read * others,
                What::ReduceScatter => written * others,
                What::AllReduce => 2 * read * others / (others + 1),
                What::Send { .. } => read,
                What::Receive { .. } => 0,
            };
        }
    }
}

/// What a call of `rank` writes. As the library does, it finds the calls that belong together by their order, and looks
/// at nothing but their elements one after another.
fn answer(board: &[Vec<Call>], rank: usize, place: usize) -> Option<Buffer> {
    let call = &board[rank][place];
    let (shape, dtype) = call.to.clone()?;
    let nth = board[rank][..place]
        .iter()
        .filter(|other| other.what == call.what)
        .count();
    let read_by = |peer: usize, what: What| {
        let call = board[peer]
            .iter()
            .filter(|call| call.what == what)
            .nth(nth)
            .expect("both sides make the call");
        let from = call.from.as_ref().expect("it reads");
        let view = from.host().expect("in host memory");
        assert!(view.offset == 0 && view.bytes.len() == from.num_elements() * from.dtype().size());
        assert_eq!(from.dtype(), dtype);
        dense(from, &[from.num_elements()]).expect("in host memory")
    };
    let flat = match call.what {
        What::Receive { from } => read_by(from, What::Send { to: rank }),
        What::Broadcast { root } => read_by(root, call.what),
        What::Send { .. } => return None,
        everyones => {
            let read: Vec<_> = (0..board.len()).map(|peer| read_by(peer, everyones)).collect();
            let (elements, size) = (read[rank].num_elements(), read.len());
            let op = match everyones {
                What::AllGather => Collective::AllGather {
                    dim: 0,
                    parts: Parts::contiguous(elements * size, size),
                },
                What::ReduceScatter => Collective::ReduceScatter {
                    dim: 0,
                    parts: Parts::contiguous(elements, size),
                },
                _ => Collective::AllReduce,
            };
            assert!(everyones == What::AllGather || reduction(dtype).is_some());
            let plan = Plan::new(&op, size, rank, &[elements]).expect("one length");
            let sources: Vec<_> = read.iter().map(Some).collect();
            assemble(plan, &read[rank], &sources).expect("in host memory")
        }
    };
    assert_eq!(
        flat.num_elements(),
        shape.iter().product::<usize>(),
        "both sides mean the same number"
    );
    Some(dense(&flat, &shape).expect("in host memory"))
}

/// Carries out operations on `size` ranks. Returns by rank what was made of each.
fn play<R: Send>(
    size: usize,
    ops: &[Collective],
    each: impl Fn(&Played<'_>, &Collective) -> R + Send + Sync,
) -> Vec<Vec<R>> {
    let board = Board::default();
    let body = |comm: std::sync::Arc<dyn Communicator>| {
        let one = |op: &Collective| {
            let played = Played {
                comm: &*comm,
                board: &board,
                made: Mutex::default(),
            };
            each(&played, op)
        };
        ops.iter().map(one).collect()
    };
    common::world(size, body).unwrap()
}

/// Runs one operation and compares with the oracle. Returns how many elements have left the rank.
fn check<E: Element + PartialEq>(played: &Played<'_>, op: &Collective, shape: &[usize]) -> usize {
    let (rank, size) = (played.comm.rank(), played.comm.size());
    let buffer = local::<E>(&input(op, rank, shape), rank);
    let sender = op
        .sender(rank, size)
        .map(|sender| (shape_of(&input(op, sender, shape)), E::dtype()));
    let transfer = Transfer { op: op.clone(), buffer };
    let results = carry_out(
        played,
        vec![transfer],
        size,
        rank,
        sender.as_ref().map(std::slice::from_ref),
    )
    .unwrap();
    let (shape, values) = expected::<E>(op, size, rank, shape);
    let what = || format!("{op:?} on rank {rank} of {size}, {:?}", E::dtype());
    assert_eq!(results.len(), 1);
    assert_eq!(results[0].shape(), shape, "{}", what());
    assert_eq!(results[0].dtype(), E::dtype(), "{}", what());
    assert_eq!(results[0].to_vec::<E>(), values, "{}", what());
    lock(&played.made).1
}

fn every_operation<E: Element + PartialEq>(size: usize, dims: &[usize], shape: &[usize]) {
    let ops = operations(shape, size, dims);
    let sent = play(size, &ops, |played, op| check::<E>(played, op, shape));
    for (place, op) in ops.iter().enumerate() {
        let counted = |rank: usize| elements_sent(op, size, rank, &shape_of(&input(op, rank, shape)));
        if *op == Collective::AllReduce {
            // What is counted on every rank is rounded.
            let (sent, counted) = (
                sent.iter().map(|sent| sent[place]).sum::<usize>(),
                (0..size).map(counted).sum::<usize>(),
            );
            assert!(
                (counted..counted + size).contains(&sent),
                "{op:?}: {sent}, counted {counted}"
            );
        } else {
            (0..size).for_each(|rank| assert_eq!(sent[rank][place], counted(rank), "{op:?} on rank {rank} of {size}"));
        }
    }
}

#[test]
fn every_operation_split_dim_and_size() {
    for size in 2..=5 {
        every_operation::<f32>(size, &[0, 1, 2, 3], &SHAPE);
    }
}

#[test]
fn every_dtype() {
    fn check<E: Element + PartialEq>() {
        every_operation::<E>(3, &[1, 2], &SHAPE);
    }
    check::<f64>();
    check::<f16>();
    check::<bf16>();
    check::<i64>();
    check::<i32>();
    check::<i16>();
    check::<i8>();
    check::<u64>();
    check::<u32>();
    check::<u16>();
    check::<u8>();
    check::<bool>();
}

#[test]
fn lengths_that_divide_and_batches_of_one() {
    for shape in [[1, 12, 6, 2], [2, 12, 6, 2], [12, 6, 1, 1]] {
        for size in [2, 3] {
            every_operation::<f32>(size, &[0, 1, 2], &shape);
            every_operation::<bf16>(size, &[0, 1, 2], &shape);
        }
    }
}

#[test]
fn tensors_without_elements() {
    for shape in [[2, 0, 3, 1], [0, 4, 3, 1], [0, 0, 0, 0]] {
        let dims: Vec<usize> = (0..3).filter(|dim| shape[*dim] > 0).collect();
        let mut ops = vec![Collective::AllReduce];
        for &dim in &dims {
            let parts = Parts::contiguous(shape[dim], 3);
            ops.push(Collective::AllGather {
                dim,
                parts: parts.clone(),
            });
            ops.push(Collective::ReduceScatter { dim, parts });
        }
        for sent in play(3, &ops, |played, op| {
            (check::<f32>(played, op, &shape), check::<bf16>(played, op, &shape))
        }) {
            assert!(sent.iter().all(|sent| *sent == (0, 0)));
        }
    }
}

/// Which calls are made, on rank 1 of 3.
#[test]
fn native_where_it_can_be() {
    fn made<E: Element + PartialEq>(op: Collective, shape: [usize; 4]) -> Vec<What> {
        let each = |played: &Played<'_>, op: &Collective| {
            check::<E>(played, op, &shape);
            std::mem::take(&mut lock(&played.made).0)
        };
        play(3, &[op], each).swap_remove(1).swap_remove(0)
    }
    let even = Parts::contiguous(6, 3);
    let zigzag = Parts::new(vec![vec![0..1, 5..6], vec![1..2, 4..5], vec![2..3, 3..4]]);
    let uneven = Parts::new(vec![vec![0..1], vec![1..4], vec![4..6]]);
    let twice = Parts::new(vec![vec![0..4], vec![2..6], vec![0..2, 4..6]]);
    let gather = |parts: &Parts| Collective::AllGather {
        dim: 1,
        parts: parts.clone(),
    };
    let scatter = |parts: &Parts| Collective::ReduceScatter {
        dim: 1,
        parts: parts.clone(),
    };
    let shape = [2, 6, 3, 1];
    for parts in [&even, &zigzag] {
        assert_eq!(made::<f32>(gather(parts), shape), [What::AllGather]);
        assert_eq!(made::<bf16>(gather(parts), shape), [What::AllGather]);
        assert_eq!(made::<f32>(scatter(parts), shape), [What::ReduceScatter]);
        assert_eq!(made::<bool>(scatter(parts), shape), [What::ReduceScatter]);
    }
    let both_ways = [0, 2]
        .map(|peer| [What::Send { to: peer }, What::Receive { from: peer }])
        .concat();
    for parts in [&uneven, &twice] {
        let (gathered, scattered) = (made::<f32>(gather(parts), shape), made::<f32>(scatter(&uneven), shape));
        assert!(gathered.iter().all(|what| both_ways.contains(what)), "{gathered:?}");
        assert_eq!(scattered, both_ways);
    }
    assert_eq!(made::<f32>(scatter(&twice), shape), [What::ReduceScatter]);
    assert_eq!(made::<bf16>(scatter(&even), shape), both_ways);
    assert_eq!(made::<i16>(scatter(&even), shape), both_ways);

    assert_eq!(made::<f64>(Collective::AllReduce, shape), [What::AllReduce]);
    assert_eq!(made::<bool>(Collective::AllReduce, shape), [What::AllReduce]);
    // 36 elements: the sums of parts of 12, then everyone's parts.
    assert_eq!(
        made::<bf16>(Collective::AllReduce, shape),
        [&both_ways[..], &[What::AllGather]].concat()
    );

    assert_eq!(
        made::<f32>(Collective::Broadcast { root: 2 }, shape),
        [What::Broadcast { root: 2 }]
    );
    let shift = [What::Send { to: 2 }, What::Receive { from: 0 }];
    let made_by = |by: isize| {
        let mut made = made::<f32>(Collective::Shift { by }, shape);
        made.sort_by_key(|what| matches!(what, What::Receive { .. }));
        made
    };
    assert_eq!(made_by(1), shift);
    assert_eq!(made_by(-5), shift);
    assert_eq!(made_by(3), []);
    let heads = Collective::AllToAll {
        gather_dim: 1,
        gather_parts: even.clone(),
        scatter_dim: 2,
        scatter_parts: Parts::contiguous(3, 3),
    };
    assert_eq!(made::<f32>(heads, shape), both_ways);
}

/// Transfers of one call share a group; those that need a second step take it together.
#[test]
fn packed_tensors_keep_their_order() {
    let each = |played: &Played<'_>, op: &Collective| {
        let (rank, size) = (played.comm.rank(), played.comm.size());
        let transfer = |buffer: Buffer| Transfer { op: op.clone(), buffer };
        let own = |shape: &[usize]| input(op, rank, shape);
        let (a, b, c) = ([2, 4, 3, 1], [1, 5, 1, 2], [2, 2, 2, 2]);
        let transfers = vec![
            transfer(local::<bf16>(&own(&a), rank)),
            transfer(local::<f32>(&own(&b), rank)),
            transfer(local::<f16>(&own(&c), rank)),
        ];
        let results = carry_out(played, transfers, size, rank, None).unwrap();
        assert_eq!(results[0].to_vec::<bf16>(), expected::<bf16>(op, size, rank, &a).1);
        assert_eq!(results[1].to_vec::<f32>(), expected::<f32>(op, size, rank, &b).1);
        assert_eq!(results[2].to_vec::<f16>(), expected::<f16>(op, size, rank, &c).1);
        let shapes: Vec<_> = results.iter().map(|result| result.shape().to_vec()).collect();
        assert_eq!(shapes, [a.to_vec(), b.to_vec(), c.to_vec()]);
        let made = lock(&played.made).0.clone();
        assert_eq!(made.iter().filter(|what| **what == What::AllReduce).count(), 1);
    };
    play(3, &[Collective::AllReduce], each);
}

/// Whoever does not send may pass a tensor of any kind.
#[test]
fn a_broadcast_has_the_senders_dtype() {
    let each = |played: &Played<'_>, op: &Collective| {
        let (rank, size) = (played.comm.rank(), played.comm.size());
        let buffer = match rank {
            1 => Buffer::from_slice(&[1.5f64, 2.5], [2]),
            _ => Buffer::empty(),
        };
        let transfer = Transfer { op: op.clone(), buffer };
        let handed = [(vec![2], DType::F64)];
        let results = carry_out(played, vec![transfer], size, rank, Some(&handed)).unwrap();
        assert_eq!(results[0].to_vec::<f64>(), [1.5, 2.5]);
    };
    play(3, &[Collective::Broadcast { root: 1 }], each);
}
