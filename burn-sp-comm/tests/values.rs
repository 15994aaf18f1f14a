//! Every collective puts every element where it belongs: compared with coordinates, never by a round trip.
#![allow(
    clippy::single_range_in_vec_init,
    reason = "a rank's part is a list of ranges, often of one"
)]

mod common;

use burn_sp_comm::{Buffer, Collective, Parts, Site, Transfer};
use burn_std::{Element, bf16, f16};
use common::*;

const SHAPE: [usize; 4] = [3, 7, 5, 2];

#[test]
fn every_operation_split_dim_and_size() {
    for size in 1..=5 {
        let ops = operations(&SHAPE, size, &[0, 1, 2, 3]);
        world(size, |comm| ops.iter().for_each(|op| check::<f32>(&*comm, op, &SHAPE))).unwrap();
    }
}

#[test]
fn larger_groups() {
    for size in [7, 8] {
        let ops = operations(&SHAPE, size, &[1, 2]);
        world(size, |comm| ops.iter().for_each(|op| check::<f32>(&*comm, op, &SHAPE))).unwrap();
    }
}

#[test]
fn any_set_of_ranks_in_any_order_is_a_group() {
    let groups: [&[usize]; 5] = [&[3, 1], &[4, 0, 2], &[2], &[1, 4, 3, 0], &[4, 3, 2, 1, 0]];
    world(5, |comm| {
        for ranks in groups {
            let Some(place) = ranks.iter().position(|rank| *rank == comm.rank()) else {
                continue;
            };
            let group = comm.subgroup(ranks, "some").unwrap();
            assert_eq!(
                (group.rank(), group.size(), group.ranks(), group.axis()),
                (place, ranks.len(), ranks, "some")
            );
            for op in operations(&SHAPE, ranks.len(), &[1, 2]) {
                check::<f32>(&*group, &op, &SHAPE);
            }
        }
    })
    .unwrap();
}

#[test]
fn groups_of_groups() {
    world(6, |comm| {
        let ranks: &[usize] = if comm.rank() % 2 == 0 { &[4, 0, 2] } else { &[1, 3, 5] };
        let half = comm.subgroup(ranks, "half").unwrap();
        let pair = if half.rank() == 0 {
            vec![half.ranks()[0]]
        } else {
            half.ranks()[1..].to_vec()
        };
        let pair = half.subgroup(&pair, "pair").unwrap();
        check::<i32>(&*pair, &Collective::AllReduce, &[2, 2]);
        check::<i32>(&*half, &Collective::AllReduce, &[2, 2]);
        check::<i32>(&*comm, &Collective::AllReduce, &[2, 2]);
    })
    .unwrap();
}

fn in_dtype<E: Element + PartialEq>() {
    let ops = operations(&SHAPE, 3, &[1, 2]);
    world(3, |comm| ops.iter().for_each(|op| check::<E>(&*comm, op, &SHAPE))).unwrap();
}

#[test]
fn every_dtype() {
    in_dtype::<f64>();
    in_dtype::<f16>();
    in_dtype::<bf16>();
    in_dtype::<i64>();
    in_dtype::<i32>();
    in_dtype::<i16>();
    in_dtype::<i8>();
    in_dtype::<u64>();
    in_dtype::<u32>();
    in_dtype::<u16>();
    in_dtype::<u8>();
    in_dtype::<bool>();
}

#[test]
fn tensors_without_elements() {
    let shapes: [&[usize]; 3] = [&[2, 0, 3], &[0, 4, 3], &[0, 0, 0]];
    world(3, |comm| {
        for shape in shapes {
            let parts = Parts::contiguous(shape[1], 3);
            check::<f32>(
                &*comm,
                &Collective::AllGather {
                    dim: 1,
                    parts: parts.clone(),
                },
                shape,
            );
            check::<f32>(
                &*comm,
                &Collective::ReduceScatter {
                    dim: 1,
                    parts: parts.clone(),
                },
                shape,
            );
            check::<f32>(&*comm, &Collective::AllReduce, shape);
            let (gather_parts, scatter_parts) = (parts, Parts::contiguous(shape[2], 3));
            check::<f32>(
                &*comm,
                &Collective::AllToAll {
                    gather_dim: 1,
                    gather_parts,
                    scatter_dim: 2,
                    scatter_parts,
                },
                shape,
            );
        }
    })
    .unwrap();
}

#[test]
fn scalars_add_up() {
    let sums = world(4, |comm| {
        let own = Buffer::from_slice(&[comm.rank() as f64 + 1.0], []);
        let sum = comm.all_reduce(own).unwrap();
        assert_eq!(sum.shape(), [0usize; 0]);
        sum.to_vec::<f64>()[0]
    });
    assert!(sums.unwrap().iter().all(|sum| *sum == 10.0));
}

/// Large enough to be made in many pieces, by all ranks together.
#[test]
fn large_tensors() {
    let shape = [3, 700, 5, 101];
    let parts = Parts::new(vec![vec![0..100, 600..700], vec![100..101], vec![101..600]]);
    world(3, |comm| {
        check::<f32>(&*comm, &Collective::AllReduce, &shape);
        check::<f32>(
            &*comm,
            &Collective::AllGather {
                dim: 1,
                parts: parts.clone(),
            },
            &shape,
        );
        check::<f32>(
            &*comm,
            &Collective::ReduceScatter {
                dim: 1,
                parts: parts.clone(),
            },
            &shape,
        );
        let (gather_parts, scatter_parts) = (parts.clone(), Parts::contiguous(101, 3));
        check::<f32>(
            &*comm,
            &Collective::AllToAll {
                gather_dim: 1,
                gather_parts,
                scatter_dim: 3,
                scatter_parts,
            },
            &shape,
        );
    })
    .unwrap();
}

/// q, k and v packed: three tensors of different shapes, dtypes and splits in one call.
#[test]
fn packed_tensors_keep_their_order() {
    world(3, |comm| {
        let op = |heads: usize| Collective::AllToAll {
            gather_dim: 1,
            gather_parts: Parts::contiguous(7, 3),
            scatter_dim: 2,
            scatter_parts: if heads == 1 {
                Parts::new(vec![vec![0..1]; 3])
            } else {
                Parts::contiguous(heads, 3)
            },
        };
        let (q, kv) = ([2, 7, 6, 3], [2, 7, 1, 3]);
        let transfers = vec![
            Transfer {
                op: op(6),
                buffer: local::<f32>(&input(&op(6), comm.rank(), &q), comm.rank()),
            },
            Transfer {
                op: op(1),
                buffer: local::<bf16>(&input(&op(1), comm.rank(), &kv), comm.rank()),
            },
            Transfer {
                op: op(1),
                buffer: local::<i64>(&input(&op(1), comm.rank(), &kv), comm.rank()),
            },
        ];
        let results = comm.run(transfers, Site::here()).unwrap();
        assert_eq!(
            results[0].to_vec::<f32>(),
            expected::<f32>(&op(6), 3, comm.rank(), &q).1
        );
        assert_eq!(
            results[1].to_vec::<bf16>(),
            expected::<bf16>(&op(1), 3, comm.rank(), &kv).1
        );
        assert_eq!(
            results[2].to_vec::<i64>(),
            expected::<i64>(&op(1), 3, comm.rank(), &kv).1
        );
    })
    .unwrap();
}

#[cfg(feature = "mpi")]
#[test]
fn over_mpi() {
    again_over_mpi(8, &[]);
}
