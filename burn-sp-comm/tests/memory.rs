//! Views, sharing instead of copying, the order and the precision of sums.
#![allow(
    clippy::single_range_in_vec_init,
    reason = "a rank's part is a list of ranges, often of one"
)]

mod common;

use burn_sp_comm::{Buffer, Collective, Communicator, Parts, Site, Transfer};
use burn_std::{Bytes, DType, Element, bf16, f16};
use common::*;
use std::sync::Arc;

/// The same [2, 4, 3, 6] tensor in other memory layouts.
fn views(rank: usize) -> Vec<(&'static str, Buffer)> {
    let shape = vec![2, 4, 3, 6];
    let plain = |order: [usize; 4], scale: isize, offset: usize| {
        // Lays the dims out in `order` (outermost first), `scale` elements apart, after `offset` others.
        let mut strides = vec![0isize; 4];
        let mut step = scale;
        for &dim in order.iter().rev() {
            strides[dim] = step;
            step *= shape[dim] as isize;
        }
        fill(rank, &shape, strides, offset, step as usize + offset + 9)
    };
    vec![
        ("heads outside tokens", plain([0, 2, 1, 3], 1, 0)),
        ("last two swapped", plain([0, 1, 3, 2], 1, 0)),
        ("all reversed", plain([3, 2, 1, 0], 1, 0)),
        ("with an offset", plain([0, 1, 2, 3], 1, 7)),
        ("every third element", plain([0, 1, 2, 3], 3, 5)),
        (
            "rows of a wider tensor",
            fill(rank, &shape, vec![160, 40, 10, 1], 3, 400),
        ),
        ("flipped tokens", fill(rank, &shape, vec![72, -18, 6, 1], 54, 144)),
        ("flipped elements", fill(rank, &shape, vec![72, 18, 6, -1], 5, 144)),
    ]
}

fn bytes(buffer: &Buffer) -> &Arc<Bytes> {
    &buffer.host().expect("a tensor in host memory").bytes
}

fn fill(rank: usize, shape: &[usize], strides: Vec<isize>, offset: usize, memory: usize) -> Buffer {
    let mut values = vec![-1.0f32; memory];
    for at in coordinates(&whole(shape)) {
        let place: isize = at.iter().zip(&strides).map(|(&i, &stride)| i as isize * stride).sum();
        values[(offset as isize + place) as usize] = value::<f32>(&at, rank) as f32;
    }
    let memory = bytes(&Buffer::from_slice(&values, [memory])).clone();
    Buffer::new(memory, shape.to_vec(), strides, offset, DType::F32).unwrap()
}

fn run(comm: &dyn Communicator, op: &Collective, buffer: Buffer) -> Buffer {
    comm.run(vec![Transfer { op: op.clone(), buffer }], Site::here())
        .unwrap()
        .remove(0)
}

#[test]
fn a_view_is_as_good_as_a_copy() {
    let two = |length: usize| Parts::contiguous(length, 2);
    // Every rank's part of a gathered dimension is the whole view, so that all layouts are read in full.
    let both = |length: usize| Parts::new(vec![vec![0..length], vec![length..2 * length]]);
    let mut ops = vec![
        Collective::AllReduce,
        Collective::Shift { by: 1 },
        Collective::Broadcast { root: 1 },
    ];
    for (dim, length) in [2, 4, 3, 6].into_iter().enumerate() {
        ops.push(Collective::AllGather {
            dim,
            parts: both(length),
        });
        ops.push(Collective::ReduceScatter {
            dim,
            parts: two(length),
        });
        for (scatter_dim, other) in [2, 4, 3, 6].into_iter().enumerate().filter(|(other, _)| *other != dim) {
            let (gather_parts, scatter_parts) = (both(length), two(other));
            ops.push(Collective::AllToAll {
                gather_dim: dim,
                gather_parts,
                scatter_dim,
                scatter_parts,
            });
        }
    }
    world(2, |comm| {
        for op in &ops {
            for (name, view) in views(comm.rank()) {
                let copy = Buffer::from_slice(&view.to_vec::<f32>(), view.shape());
                assert_eq!(
                    copy.to_vec::<f32>(),
                    local::<f32>(&whole(view.shape()), comm.rank()).to_vec::<f32>()
                );
                let (seen, wanted) = (run(&*comm, op, view), run(&*comm, op, copy));
                assert_eq!(seen.shape(), wanted.shape());
                assert_eq!(seen.to_vec::<f32>(), wanted.to_vec::<f32>(), "{name}: {op:?}");
            }
        }
    })
    .unwrap();
}

#[test]
fn expanded_tensors() {
    world(3, |comm| {
        let memory = bytes(&Buffer::from_slice(&[1.5f32, 2.5, comm.rank() as f32], [3])).clone();
        for (shape, strides) in [([4, 3], [0isize, 1]), ([3, 4], [1, 0]), ([4, 4], [0, 0])] {
            let view = Buffer::new(memory.clone(), shape.to_vec(), strides.to_vec(), 0, DType::F32).unwrap();
            let copy = Buffer::from_slice(&view.to_vec::<f32>(), shape);
            let parts = Parts::contiguous(3 * shape[0], 3);
            let gather = Collective::AllGather { dim: 0, parts };
            for op in [Collective::AllReduce, gather] {
                let (seen, wanted) = (run(&*comm, &op, view.clone()), run(&*comm, &op, copy.clone()));
                assert_eq!(seen.to_vec::<f32>(), wanted.to_vec::<f32>());
            }
        }
    })
    .unwrap();
}

#[test]
fn big_transposed_tensors() {
    world(2, |comm| {
        let shape = [37, 65, 50];
        let view = |strides: Vec<isize>| fill(comm.rank(), &shape, strides, 0, 37 * 65 * 50);
        for strides in [vec![1, 37 * 50, 37], vec![50, 37 * 50, 1], vec![65 * 50, 1, 65]] {
            let op = Collective::ReduceScatter {
                dim: 1,
                parts: Parts::contiguous(65, 2),
            };
            let (_, values) = expected::<f32>(&op, 2, comm.rank(), &shape);
            assert_eq!(run(&*comm, &op, view(strides.clone())).to_vec::<f32>(), values);
            let scatter_parts = Parts::contiguous(50, 2);
            let gather_parts = Parts::new(vec![vec![0..37], vec![37..74]]);
            let op = Collective::AllToAll {
                gather_dim: 0,
                gather_parts,
                scatter_dim: 2,
                scatter_parts,
            };
            let copy = Buffer::from_slice(&view(strides.clone()).to_vec::<f32>(), shape);
            let (seen, wanted) = (run(&*comm, &op, view(strides)), run(&*comm, &op, copy));
            assert_eq!(seen.to_vec::<f32>(), wanted.to_vec::<f32>());
        }
    })
    .unwrap();
}

#[test]
fn handing_over_copies_nothing() {
    let sent = world(3, |comm| {
        let own = Buffer::from_slice(&[comm.rank() as f32; 6], [2, 3]);
        let mine = Arc::as_ptr(bytes(&own)).addr();
        let shifted = comm.shift(own.clone(), 1).unwrap();
        let root = comm.broadcast(own.clone(), 2).unwrap();
        let alone = comm.subgroup(&[comm.rank()], "alone").unwrap();
        assert!(Arc::ptr_eq(bytes(&alone.all_reduce(own.clone()).unwrap()), bytes(&own)));
        let parts = Parts::new(vec![vec![0..2]]);
        assert!(Arc::ptr_eq(
            bytes(&alone.all_gather(own.clone(), 0, &parts).unwrap()),
            bytes(&own)
        ));
        comm.barrier().unwrap();
        // Keep the tensor until all have compared, so that no address is used twice.
        let addresses = (
            mine,
            Arc::as_ptr(bytes(&shifted)).addr(),
            Arc::as_ptr(bytes(&root)).addr(),
        );
        comm.barrier().unwrap();
        addresses
    })
    .unwrap();
    for rank in 0..3 {
        assert_eq!(sent[rank].1, sent[(rank + 2) % 3].0);
        assert_eq!(sent[rank].2, sent[2].0);
    }
}

#[test]
fn a_shifted_tensor_belongs_to_its_receiver() {
    world(2, |comm| {
        let shifted = comm.shift(Buffer::from_slice(&[1u8, 2], [2]), 1).unwrap();
        comm.barrier().unwrap();
        assert_eq!(Arc::strong_count(bytes(&shifted)), 1, "so a backend may work in place");
    })
    .unwrap();
}

/// Pseudo-random, of very different sizes, so that the order of a sum shows in its bits.
fn noise(rank: usize, length: usize) -> Vec<f32> {
    let mut state = rank as u32 * 7919 + 1;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        f32::from_bits((state >> 9) | 0x3f80_0000) - 1.5
    };
    (0..length).map(|i| next() * 10f32.powi((i % 7) as i32 - 3)).collect()
}

fn sums<E: Element>(length: usize, narrow: impl Fn(f32) -> E + Sync, sum: impl Fn(Vec<E>) -> E + Sync) {
    for size in [2, 3, 5] {
        let values: Vec<Vec<E>> = (0..size)
            .map(|rank| noise(rank, length).into_iter().map(&narrow).collect())
            .collect();
        let wanted: Vec<E> = (0..length)
            .map(|i| sum(values.iter().map(|own| own[i]).collect()))
            .collect();
        let wanted = Buffer::from_slice(&wanted, [length]);
        let parts = Parts::contiguous(length, size);
        world(size, |comm| {
            let own = Buffer::from_slice(&values[comm.rank()], [length]);
            let sum = comm.all_reduce(own.clone()).unwrap();
            assert!(
                bytes(&sum)[..] == bytes(&wanted)[..],
                "all_reduce in rank order, {:?}",
                E::dtype()
            );
            let part = comm.reduce_scatter(own, 0, &parts).unwrap();
            let range = parts.of(comm.rank())[0].clone();
            let own = range.start * size_of::<E>()..range.end * size_of::<E>();
            assert!(
                bytes(&part)[..] == bytes(&wanted)[own],
                "reduce_scatter in rank order, {:?}",
                E::dtype()
            );
        })
        .unwrap();
    }
}

#[test]
fn sums_are_taken_in_rank_order_and_rounded_once() {
    let add = |values: Vec<f32>| values[1..].iter().fold(values[0], |sum, value| sum + value);
    // One below and one above the size at which several pieces are made.
    for length in [1001, 700_001] {
        sums::<f32>(length, |x| x, add);
        sums::<f64>(length, f64::from, |values| {
            values[1..].iter().fold(values[0], |sum, value| sum + value)
        });
        sums::<bf16>(length, bf16::from_f32, |values| {
            bf16::from_f32(add(values.into_iter().map(bf16::to_f32).collect()))
        });
        sums::<f16>(length, f16::from_f32, |values| {
            f16::from_f32(add(values.into_iter().map(f16::to_f32).collect()))
        });
    }
}

#[test]
fn small_terms_survive_in_bf16() {
    let sums = world(5, |comm| {
        let own = if comm.rank() == 0 { 256.0 } else { 1.0 };
        comm.all_reduce(Buffer::from_slice(&[bf16::from_f32(own)], [1]))
            .unwrap()
            .to_vec::<bf16>()[0]
            .to_f32()
    });
    // bf16 has steps of 2 at 256, so one by one every 1 would be lost.
    assert_eq!(sums.unwrap(), [260.0; 5]);
}

#[test]
fn views_outside_their_bytes_are_refused() {
    let memory = bytes(&Buffer::from_slice(&[0.0f32; 6], [6])).clone();
    let view = |shape: &[usize], strides: &[isize], offset| {
        Buffer::new(memory.clone(), shape.to_vec(), strides.to_vec(), offset, DType::F32)
    };
    assert!(view(&[2, 3], &[3, 1], 0).is_ok());
    assert!(view(&[2, 3], &[3, -1], 2).is_ok());
    assert!(view(&[100, 6], &[0, 1], 0).is_ok());
    assert!(view(&[0, 100], &[100, 1], 50).is_ok());
    let error = view(&[2, 3], &[3, 1], 1).unwrap_err().to_string();
    assert_eq!(
        error,
        "buffer of shape [2, 3], strides [3, 1], offset 1, f32: reaches elements 1..=6, but there are 6"
    );
    assert!(view(&[2, 3], &[3, -1], 1).is_err());
    assert!(view(&[2, 3], &[1], 0).is_err());
    assert!(view(&[usize::MAX, 2], &[isize::MAX, 1], 0).is_err());
    assert!(Buffer::contiguous(burn_std::Bytes::from_elems(vec![0u8; 7]), vec![7], DType::F32).is_err());
}
