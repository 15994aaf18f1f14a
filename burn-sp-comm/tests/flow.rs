//! Started collectives, several groups at once, and what is counted.
#![allow(
    clippy::single_range_in_vec_init,
    reason = "a rank's part is a list of ranges, often of one"
)]

mod common;

use burn_sp_comm::{Buffer, Collective, Communicator, Counter, Parts, Pending, Site, Transfer};
use common::*;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

/// A way for ranks to meet that is no collective.
fn channel() -> (Mutex<mpsc::Sender<()>>, Mutex<mpsc::Receiver<()>>) {
    let (sender, receiver) = mpsc::channel();
    (Mutex::new(sender), Mutex::new(receiver))
}

fn start(comm: &dyn Communicator, op: Collective, buffer: Buffer) -> Box<dyn Pending> {
    comm.start(vec![Transfer { op, buffer }], Site::here()).unwrap()
}

fn number(comm: &dyn Communicator) -> Buffer {
    Buffer::from_slice(&[comm.rank() as i64], [1])
}

/// The rank, once and so often that an engine may sum and send in parts.
fn numbers(comm: &dyn Communicator) -> [Buffer; 2] {
    [1, 10_000].map(|length| Buffer::from_slice(&vec![comm.rank() as i64; length], [length]))
}

/// Whether all elements are this number.
fn all(buffer: &Buffer, number: i64) -> bool {
    buffer.to_vec::<i64>().iter().all(|element| *element == number)
}

/// Case 33: a ring in which everyone sends before anyone receives.
#[test]
fn rings_of_any_size_finish() {
    for size in 2..=8 {
        world(size, |comm| {
            let mut visitor = number(&*comm);
            for hop in 1..=3 * size {
                visitor = comm.shift(visitor, 1).unwrap();
                assert_eq!(
                    visitor.to_vec::<i64>(),
                    [((comm.rank() + 3 * size - hop) % size) as i64]
                );
            }
        })
        .unwrap();
    }
}

#[test]
fn several_collectives_are_in_flight_and_awaited_in_any_order() {
    world(4, |comm| {
        let shifts: Vec<_> = (1..4)
            .map(|by| start(&*comm, Collective::Shift { by }, number(&*comm)))
            .collect();
        let sum = start(&*comm, Collective::AllReduce, number(&*comm));
        let parts = Parts::contiguous(4, 4);
        let gather = start(&*comm, Collective::AllGather { dim: 0, parts }, number(&*comm));
        // The last first.
        assert_eq!(gather.wait().unwrap()[0].to_vec::<i64>(), [0, 1, 2, 3]);
        assert_eq!(sum.wait().unwrap()[0].to_vec::<i64>(), [6]);
        for (by, shift) in (1..4).zip(shifts).rev() {
            assert_eq!(
                shift.wait().unwrap()[0].to_vec::<i64>(),
                [((comm.rank() + 4 - by) % 4) as i64]
            );
        }
    })
    .unwrap();
}

/// More than an engine may have under way at once, of tensors of one size, which could be taken for one another.
#[test]
fn many_calls_of_a_group_are_in_flight() {
    world(4, |comm| {
        let begin = |call: i64| {
            let own = Buffer::from_slice(&vec![100 * call + comm.rank() as i64; 5000], [5000]);
            let parts = Parts::contiguous(20_000, 4);
            start(&*comm, Collective::AllGather { dim: 0, parts }, own)
        };
        let calls: Vec<_> = (0..50).map(begin).collect();
        for (call, pending) in calls.into_iter().enumerate().rev() {
            let whole = pending.wait().unwrap().remove(0).to_vec::<i64>();
            let expected = (0..20_000).map(|at| (100 * call + at / 5000) as i64);
            assert!(whole.into_iter().eq(expected), "call {call}");
        }
    })
    .unwrap();
}

/// A rank may start something, forgo it and return, though the others never call it.
#[test]
fn what_is_forgone_holds_up_no_one_at_the_end() {
    for op in [Collective::AllReduce, Collective::Shift { by: 1 }, Collective::Barrier] {
        world(3, |comm| {
            if comm.rank() == 0 {
                drop(start(&*comm, op.clone(), number(&*comm)));
            }
        })
        .unwrap();
        world(3, |comm| {
            // A group that its first member does not know.
            if comm.rank() == 2 {
                drop(start(
                    &*comm.subgroup(&[0, 2], "late").unwrap(),
                    op.clone(),
                    number(&*comm),
                ));
            }
        })
        .unwrap();
    }
}

#[test]
fn starting_does_not_wait_on_threads() {
    let (sender, receiver) = channel();
    world(2, |comm| {
        let pending = if comm.rank() == 0 {
            let pending = start(&*comm, Collective::AllReduce, number(&*comm));
            sender.lock().unwrap().send(()).unwrap();
            pending
        } else {
            // Comes only when rank 0 has started.
            receiver.lock().unwrap().recv_timeout(Duration::from_secs(10)).unwrap();
            start(&*comm, Collective::AllReduce, number(&*comm))
        };
        assert_eq!(pending.wait().unwrap()[0].to_vec::<i64>(), [1]);
    })
    .unwrap();
}

#[test]
fn a_shift_needs_only_its_source_on_threads() {
    let (sender, receiver) = channel();
    world(3, |comm| {
        let shift = |comm: &dyn Communicator| start(comm, Collective::Shift { by: 1 }, number(comm));
        match comm.rank() {
            0 => drop(shift(&*comm)),
            1 => {
                // Rank 2, which waits for this, has not even started.
                assert_eq!(shift(&*comm).wait().unwrap()[0].to_vec::<i64>(), [0]);
                sender.lock().unwrap().send(()).unwrap();
            }
            _ => {
                receiver.lock().unwrap().recv_timeout(Duration::from_secs(10)).unwrap();
                assert_eq!(shift(&*comm).wait().unwrap()[0].to_vec::<i64>(), [1]);
            }
        }
        comm.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn results_that_nobody_awaits_hold_up_no_one() {
    world(3, |comm| {
        for round in 0..20 {
            for own in numbers(&*comm) {
                let sum = start(&*comm, Collective::AllReduce, own);
                if (round + comm.rank()) % 3 == 0 {
                    drop(sum);
                } else {
                    assert!(all(&sum.wait().unwrap()[0], 3));
                }
            }
        }
    })
    .unwrap();
}

#[test]
fn two_groups_work_at_the_same_time() {
    // A 2 x 3 mesh: rows and columns in turn, both in flight, in another order on every second rank.
    world(6, |comm| {
        let (row, column) = (comm.rank() / 3, comm.rank() % 3);
        let rows = comm.subgroup(&[row * 3, row * 3 + 1, row * 3 + 2], "ring").unwrap();
        let columns = comm.subgroup(&[column + 3, column], "ulysses").unwrap();
        for own in (0..50).flat_map(|_| numbers(&*comm)) {
            let op = Collective::AllReduce;
            let (first, second) = if comm.rank() % 2 == 0 {
                (&rows, &columns)
            } else {
                (&columns, &rows)
            };
            let pending = (start(&**first, op.clone(), own.clone()), start(&**second, op, own));
            let sums = (pending.0.wait().unwrap().remove(0), pending.1.wait().unwrap().remove(0));
            let (in_row, in_column) = if comm.rank() % 2 == 0 { sums } else { (sums.1, sums.0) };
            assert!(all(&in_row, 9 * row as i64 + 3));
            assert!(all(&in_column, 2 * column as i64 + 3));
        }
    })
    .unwrap();
}

#[test]
fn bytes_and_calls_follow_the_formulas() {
    for size in 2..=5usize {
        world(size, |comm| {
            let group = comm.subgroup(&(0..size).rev().collect::<Vec<_>>(), "axis").unwrap();
            let (tokens, heads) = (6 * size, 2 * size);
            let (by_token, by_head) = (Parts::contiguous(tokens, size), Parts::contiguous(heads, size));
            let n = tokens * heads;
            let floats = |shape: [usize; 2]| Buffer::from_slice(&vec![1.0f32; shape[0] * shape[1]], shape);
            group.all_gather(floats([tokens / size, heads]), 0, &by_token).unwrap();
            group.reduce_scatter(floats([tokens, heads]), 0, &by_token).unwrap();
            group.all_reduce(floats([tokens, heads])).unwrap();
            group
                .all_to_all(floats([tokens / size, heads]), (0, &by_token), (1, &by_head))
                .unwrap();
            for _ in 1..size {
                group.shift(floats([tokens / size, heads]), 1).unwrap();
            }
            group.broadcast(floats([tokens, heads]), 1).unwrap();
            group.barrier().unwrap();
            let op = Collective::AllReduce;
            let packed = [0, 1, 2].map(|_| Transfer {
                op: op.clone(),
                buffer: floats([size, 1]),
            });
            comm.run(packed.into(), Site::here()).unwrap();
            let alone = comm.subgroup(&[comm.rank()], "alone").unwrap();
            alone.all_reduce(floats([2, 2])).unwrap();

            let counters = comm.statistics();
            assert_eq!(
                counters,
                group.statistics(),
                "a rank's counters, whichever group is asked"
            );
            let others = size - 1;
            let expected = [
                ("all_gather", "axis", 1, n / size * others),
                ("all_reduce", "axis", 1, 2 * n * others / size),
                ("all_reduce", "world", 1, 3 * 2 * others),
                ("all_to_all", "axis", 1, n / size * others / size),
                ("barrier", "axis", 1, 0),
                ("broadcast", "axis", 1, if group.rank() == 1 { n * others } else { 0 }),
                ("reduce_scatter", "axis", 1, n * others / size),
                ("shift", "axis", others, n / size * others),
            ];
            let seen: Vec<_> = counters
                .iter()
                .map(|c| (&c.op[..], &c.axis[..], c.calls, c.bytes_sent))
                .collect();
            let expected = expected.map(|(op, axis, calls, elements)| (op, axis, calls as u64, 4 * elements as u64));
            assert_eq!(seen, expected);
            assert!(
                counters
                    .iter()
                    .all(|c| c.rank == comm.rank() && c.seconds > 0.0 && c.seconds < 20.0)
            );
            comm.reset_statistics();
            assert_eq!(comm.statistics(), []);
        })
        .unwrap();
    }
}

#[test]
fn seconds_are_those_spent_waiting_on_threads() {
    // Long against what a busy machine adds.
    const PAUSE: Duration = Duration::from_millis(1500);
    let counters = world(2, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(PAUSE);
        }
        let pending = start(&*comm, Collective::AllReduce, number(&*comm));
        pending.wait().unwrap();
        // Compute between start and wait does not count.
        let pending = start(&*comm, Collective::AllReduce, number(&*comm));
        std::thread::sleep(PAUSE);
        pending.wait().unwrap();
        comm.statistics().remove(0)
    })
    .unwrap();
    let [waited, came_late]: [Counter; 2] = counters.try_into().unwrap();
    let pause = PAUSE.as_secs_f64();
    // The pause, less what this rank's thread was slow to start.
    assert!(
        waited.seconds > 0.5 * pause && waited.seconds < 1.8 * pause,
        "{waited:?}"
    );
    assert!(came_late.seconds < 0.8 * pause, "{came_late:?}");
}

#[cfg(feature = "mpi")]
#[test]
fn over_mpi() {
    again_over_mpi(8, &["on_threads"]);
}
