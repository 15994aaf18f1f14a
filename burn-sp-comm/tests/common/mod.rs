//! Splits, coordinates and an oracle that shares nothing with the crate but the meaning of the operations.
#![allow(dead_code, reason = "every test file uses its own selection")]

mod engine;

use burn_sp_comm::{Buffer, Collective, Communicator, Parts};
use burn_std::Element;
pub use engine::*;

/// Contiguous, zigzag, uneven, with empty ranks, and scattered single indices.
pub fn splits(length: usize, ranks: usize) -> Vec<Parts> {
    let chunks = Parts::contiguous(length, 2 * ranks);
    let zigzag = (0..ranks)
        .map(|r| vec![chunks.of(r)[0].clone(), chunks.of(2 * ranks - 1 - r)[0].clone()])
        .collect::<Vec<_>>();
    // 1, 2, 3, ... and the rest to the last.
    let edge = |r: usize| {
        if r == ranks {
            length
        } else {
            (r * (r + 1) / 2).min(length)
        }
    };
    let uneven = (0..ranks).map(|r| vec![edge(r)..edge(r + 1)]).collect();
    let one_owner = (0..ranks)
        .map(|r| if r + 1 == ranks { vec![0..length] } else { vec![] })
        .collect();
    let scattered = (0..ranks).map(|r| {
        (0..length)
            .rev()
            .filter(|i| (i * 3 + 1) % ranks == r)
            .map(|i| i..i + 1)
            .collect()
    });
    vec![
        Parts::contiguous(length, ranks),
        Parts::new(zigzag),
        Parts::new(uneven),
        Parts::new(one_owner),
        Parts::new(scattered.collect()),
    ]
}

/// Every rank owns a stretch that reaches into its neighbours', and the first one index more.
pub fn overlapping(length: usize, ranks: usize) -> Parts {
    let own = |r: usize| {
        let (start, end) = (r * length / ranks, ((r + 1) * length / ranks + 1).min(length));
        let mut ranges = vec![start.saturating_sub(1)..end];
        if r == 0 {
            ranges.push(length - 1..length);
        }
        ranges
    };
    Parts::new((0..ranks).map(own).collect())
}

/// The global indices that a rank owns, in local order.
pub fn owned(parts: &Parts, rank: usize) -> Vec<usize> {
    parts.of(rank).iter().cloned().flatten().collect()
}

/// For every dim, the global index of every local one.
pub type Indices = Vec<Vec<usize>>;

pub fn whole(shape: &[usize]) -> Indices {
    shape.iter().map(|&length| (0..length).collect()).collect()
}

pub fn with(mut indices: Indices, dim: usize, own: Vec<usize>) -> Indices {
    indices[dim] = own;
    indices
}

/// The ranks whose values make up an element.
type Sources<'a> = Box<dyn Fn(&[usize]) -> Vec<usize> + 'a>;

/// All combinations, row-major.
pub fn coordinates(indices: &Indices) -> Vec<Vec<usize>> {
    indices.iter().fold(vec![vec![]], |all, dim| {
        all.iter()
            .flat_map(|head| dim.iter().map(|&i| [&head[..], &[i]].concat()))
            .collect()
    })
}

pub fn shape_of(indices: &Indices) -> Vec<usize> {
    indices.iter().map(Vec::len).collect()
}

/// x[b, s, h, d] of a rank, small enough that sums over ranks stay exact in `E`.
pub fn value<E: Element>(at: &[usize], rank: usize) -> i64 {
    let weights = [1_000_000, 10_000, 100, 1];
    let x: i64 = at.iter().zip(weights).map(|(&i, weight)| i as i64 * weight).sum();
    let full = x + 10_000_000 * rank as i64;
    match (size_of::<E>(), E::dtype()) {
        (_, burn_std::DType::Bool(_)) => i64::from((full / 100 + full) % 3 == 0),
        (1 | 2, _) => full % 23,
        (4, burn_std::DType::F32) => full % 3_000_001,
        _ => full,
    }
}

pub fn local<E: Element>(indices: &Indices, rank: usize) -> Buffer {
    let values: Vec<E> = coordinates(indices)
        .iter()
        .map(|at| E::from_elem(value::<E>(at, rank)))
        .collect();
    Buffer::from_slice(&values, shape_of(indices))
}

/// What `rank` passes to `op` when the whole tensor is `shape`.
pub fn input(op: &Collective, rank: usize, shape: &[usize]) -> Indices {
    match op {
        Collective::AllGather { dim, parts } => with(whole(shape), *dim, owned(parts, rank)),
        Collective::AllToAll {
            gather_dim,
            gather_parts,
            ..
        } => with(whole(shape), *gather_dim, owned(gather_parts, rank)),
        // Different shapes on purpose.
        Collective::Shift { .. } | Collective::Broadcast { .. } => with(whole(shape), 1, (0..=rank).collect()),
        _ => whole(shape),
    }
}

/// What `rank` must get: its indices, and at every coordinate the sum over these ranks.
pub fn expected<E: Element>(op: &Collective, size: usize, rank: usize, shape: &[usize]) -> (Vec<usize>, Vec<E>) {
    let all: Vec<usize> = (0..size).collect();
    let owners = |parts: &Parts, index: usize| -> Vec<usize> {
        all.iter()
            .flat_map(|&r| owned(parts, r).into_iter().filter(move |&i| i == index).map(move |_| r))
            .collect()
    };
    let (indices, sources): (Indices, Sources<'_>) = match op {
        Collective::AllGather { dim, parts } => {
            (whole(shape), Box::new(move |at| owners(parts, at[*dim])[..1].to_vec()))
        }
        Collective::ReduceScatter { dim, parts } => {
            (with(whole(shape), *dim, owned(parts, rank)), Box::new(|_| all.clone()))
        }
        Collective::AllReduce => (whole(shape), Box::new(|_| all.clone())),
        Collective::AllToAll {
            gather_dim,
            gather_parts,
            scatter_dim,
            scatter_parts,
        } => (
            with(whole(shape), *scatter_dim, owned(scatter_parts, rank)),
            Box::new(move |at| owners(gather_parts, at[*gather_dim])),
        ),
        Collective::Shift { by } => {
            let source = (rank as isize - by).rem_euclid(size as isize) as usize;
            (input(op, source, shape), Box::new(move |_| vec![source]))
        }
        Collective::Broadcast { root } => (input(op, *root, shape), Box::new(|_| vec![*root])),
        Collective::Barrier => (input(op, rank, shape), Box::new(|_| vec![rank])),
    };
    let sum = |at: &Vec<usize>| E::from_elem(sources(at).iter().map(|&r| value::<E>(at, r)).sum::<i64>());
    (shape_of(&indices), coordinates(&indices).iter().map(sum).collect())
}

/// Every operation, over `dims` and all splits.
pub fn operations(shape: &[usize], size: usize, dims: &[usize]) -> Vec<Collective> {
    let mut ops = vec![Collective::AllReduce, Collective::Barrier];
    ops.extend([0, 1, 2, -1, -7].map(|by| Collective::Shift { by }));
    ops.extend((0..size).map(|root| Collective::Broadcast { root }));
    let all = |dim: usize| {
        splits(shape[dim], size)
            .into_iter()
            .chain([overlapping(shape[dim], size)])
    };
    for &dim in dims {
        ops.extend(all(dim).map(|parts| Collective::AllGather { dim, parts }));
        ops.extend(all(dim).map(|parts| Collective::ReduceScatter { dim, parts }));
        for &scatter_dim in dims {
            for gather_parts in all(dim) {
                ops.extend(all(scatter_dim).map(|scatter_parts| Collective::AllToAll {
                    gather_dim: dim,
                    gather_parts: gather_parts.clone(),
                    scatter_dim,
                    scatter_parts,
                }));
            }
        }
    }
    ops
}

/// Runs the operation on this rank and compares with the oracle.
pub fn check<E: Element + PartialEq>(comm: &dyn Communicator, op: &Collective, shape: &[usize]) {
    let buffer = local::<E>(&input(op, comm.rank(), shape), comm.rank());
    let transfer = burn_sp_comm::Transfer { op: op.clone(), buffer };
    let result = comm
        .run(vec![transfer], burn_sp_comm::Site::here())
        .unwrap_or_else(|e| burn_sp_comm::raise(e));
    let (shape, values) = expected::<E>(op, comm.size(), comm.rank(), shape);
    let what = || format!("{op:?} on rank {} of {:?}, {:?}", comm.rank(), comm.ranks(), E::dtype());
    assert_eq!(result.len(), 1);
    assert_eq!(result[0].shape(), shape, "{}", what());
    assert_eq!(result[0].dtype(), E::dtype(), "{}", what());
    assert_eq!(result[0].to_vec::<E>(), values, "{}", what());
}
