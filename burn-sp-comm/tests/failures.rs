//! Whatever one rank does wrong, every rank gets the same report, in time. Nothing hangs.
#![allow(
    clippy::single_range_in_vec_init,
    reason = "a rank's part is a list of ranges, often of one"
)]

mod common;

use burn_sp_comm::engines::threads::{ThreadsConfig, launch, try_launch};
use burn_sp_comm::{Buffer, Collective, CommError, Communicator, Parts, Site, Transfer, raise};
use common::Failure;
use std::time::Duration;

/// Long against what a busy machine makes a thread wait: some tests expect a rank to be somewhere before a part of it.
const TIMEOUT: Duration = Duration::from_millis(2400);

fn fails(ranks: usize, body: impl Fn(&dyn Communicator) -> Result<(), CommError> + Send + Sync) -> (CommError, usize) {
    let Failure { error, told, .. } = common::fails(ranks, TIMEOUT, body);
    (error, told)
}

fn contains(error: &CommError, words: &[&str]) {
    let text = error.to_string();
    words
        .iter()
        .for_each(|word| assert!(text.contains(word), "{word:?} is missing in: {text}"));
}

fn tensor(shape: &[usize]) -> Buffer {
    Buffer::from_slice(&vec![1.0f32; shape.iter().product()], shape)
}

#[test]
fn a_panic_reaches_every_rank_at_once() {
    let Failure { error, told, took } = common::fails(4, TIMEOUT, |comm| {
        let pair = comm.subgroup(if comm.rank() < 2 { &[0, 1] } else { &[3, 2] }, "pair")?;
        if comm.rank() == 1 {
            panic!("token {} is not in the vocabulary", 77);
        }
        // Rank 0 waits in a group of the panicking rank; 2 and 3 first finish one without it.
        pair.all_reduce(tensor(&[2]))?;
        comm.barrier()
    });
    assert!(took < TIMEOUT, "woken up, not timed out");
    assert_eq!(told, 3);
    contains(
        &error,
        &[
            "rank 1 panicked at ",
            "failures.rs:",
            "token 77 is not in the vocabulary",
        ],
    );
    assert!(matches!(
        error,
        CommError::Panic {
            rank: 1,
            location: Some(_),
            ..
        }
    ));
}

#[test]
fn a_panic_without_message_or_place() {
    let (error, _) = fails(2, |comm| match comm.rank() {
        0 => std::panic::resume_unwind(Box::new(5u8)),
        _ => comm.barrier(),
    });
    assert_eq!(
        error,
        CommError::Panic {
            rank: 0,
            message: "(no message)".into(),
            location: None
        }
    );
    // A panic that the rank caught itself is not mistaken for the one that ended it.
    let (error, _) = fails(2, |comm| {
        if comm.rank() == 0 {
            let _ = std::panic::catch_unwind(|| panic!("caught"));
            std::panic::resume_unwind(Box::new("from a worker"));
        }
        comm.barrier()
    });
    assert_eq!(
        error,
        CommError::Panic {
            rank: 0,
            message: "from a worker".into(),
            location: None
        }
    );
}

#[test]
fn a_late_rank_is_named_with_what_all_are_doing() {
    let (error, told) = fails(3, |comm| {
        comm.all_reduce(tensor(&[1]))?;
        if comm.rank() == 2 {
            std::thread::sleep(TIMEOUT + TIMEOUT / 3);
        }
        let parts = Parts::contiguous(3, 3);
        comm.all_gather(tensor(&[1]), 0, &parts).map(drop)
    });
    assert_eq!(told, 3, "the late one too");
    assert!(matches!(error, CommError::Timeout { .. }));
    contains(
        &error,
        &[
            "waited 2400 ms in all_gather over world (call 1) at ",
            "for rank 2. ",
            "rank 0: waiting in all_gather over world (call 1) at ",
            "rank 2: computing since its last collective, all_reduce over world (call 0) at ",
            "failures.rs:",
        ],
    );
}

#[test]
fn a_rank_in_another_group_is_late_for_this_one() {
    let (error, told) = fails(3, |comm| {
        if comm.rank() == 2 {
            return comm.barrier();
        }
        let pair = comm.subgroup(&[1, 0], "tp")?;
        pair.barrier()?;
        pair.broadcast(tensor(&[2]), 0)?;
        if comm.rank() == 0 {
            pair.barrier()
        } else {
            comm.barrier()
        }
    });
    assert_eq!(told, 3);
    contains(
        &error,
        &[
            "rank 0: waiting in barrier over tp",
            "rank 1: waiting in barrier over world (call 0)",
        ],
    );
}

#[test]
fn another_operation() {
    let (error, told) = fails(3, |comm| {
        let axis = comm.subgroup(&[2, 0, 1], "ulysses")?;
        // Nobody calls at the same time as the one who differs, so that all are in the report.
        std::thread::sleep(if comm.rank() == 1 { TIMEOUT / 3 } else { Duration::ZERO });
        let parts = Parts::contiguous(6, 3);
        match comm.rank() {
            1 => axis.reduce_scatter(tensor(&[6, 3]), 0, &parts).map(drop),
            _ => axis.all_gather(tensor(&[2, 3]), 0, &parts).map(drop),
        }
    });
    assert_eq!(told, 3);
    contains(
        &error,
        &[
            "disagree on the operation: ",
            "rank 2: all_gather over ulysses [2, 3, f32] at burn-sp-comm/tests/failures.rs:",
            "rank 0: all_gather over ulysses [2, 3, f32] at ",
            "rank 1: reduce_scatter over ulysses [6, 3, f32] at ",
        ],
    );
}

#[test]
fn a_rank_that_is_not_there_yet_is_said_to_be() {
    let (error, _) = fails(3, |comm| match comm.rank() {
        0 => comm.barrier(),
        1 => comm.all_reduce(tensor(&[1])).map(drop),
        _ => {
            std::thread::sleep(TIMEOUT / 3);
            comm.barrier()
        }
    });
    contains(&error, &["rank 0: barrier over world at ", "rank 2: not there yet"]);
}

#[test]
fn another_shape_dtype_number_or_parameter() {
    let differ = |call: &(dyn Fn(&dyn Communicator, bool) -> Result<(), CommError> + Sync)| {
        let (error, told) = fails(2, |comm| call(comm, comm.rank() == 1));
        assert_eq!(told, 2);
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
        error
    };
    let error = differ(&|comm, odd| comm.all_reduce(tensor(if odd { &[2, 3] } else { &[3, 2] })).map(drop));
    contains(&error, &["disagree on the shape", "[3, 2, f32]", "[2, 3, f32]"]);
    let parts = Parts::contiguous(4, 2);
    let error = differ(&|comm, odd| {
        comm.all_gather(tensor(if odd { &[5, 2] } else { &[6, 2] }), 1, &parts)
            .map(drop)
    });
    contains(&error, &["disagree on the shape", "[6, 2, f32]", "[5, 2, f32]"]);
    let error = differ(&|comm, odd| {
        let whole = if odd {
            Buffer::from_slice(&[1i64, 2], [2])
        } else {
            tensor(&[2])
        };
        comm.shift(whole, 1).map(drop)
    });
    contains(&error, &["disagree on the dtype", "[2, f32]", "[2, i64]"]);
    let error = differ(&|comm, odd| comm.shift(tensor(&[2]), if odd { 1 } else { -1 }).map(drop));
    contains(
        &error,
        &[
            "disagree on the parameters",
            "shift (by -1) over world",
            "shift (by 1) over world",
        ],
    );
    let error = differ(&|comm, odd| comm.reduce_scatter(tensor(&[4, 4]), usize::from(odd), &parts).map(drop));
    contains(
        &error,
        &[
            "disagree on the parameters",
            "(dim 0, parts [0..2 | 2..4])",
            "(dim 1, parts",
        ],
    );
    let other = Parts::new(vec![vec![0..1], vec![1..4]]);
    let error = differ(&|comm, odd| {
        comm.reduce_scatter(tensor(&[4]), 0, if odd { &other } else { &parts })
            .map(drop)
    });
    contains(&error, &["parts [0..2 | 2..4]", "parts [0..1 | 1..4]"]);
    let error = differ(&|comm, odd| {
        let transfer = Transfer {
            op: Collective::AllReduce,
            buffer: tensor(&[1]),
        };
        comm.run(vec![transfer; 1 + usize::from(odd)], Site::here().backward())
            .map(drop)
    });
    contains(
        &error,
        &[
            "number of tensors",
            "all_reduce over world [1, f32] [1, f32] at backward of ",
        ],
    );
}

#[test]
fn what_disagrees_is_never_a_result_on_threads() {
    // The one who posts first looks again just when the other has posted something else.
    for _ in 0..500 {
        let (error, told) = fails(2, |comm| {
            let whole = match comm.rank() {
                0 => tensor(&[2]),
                _ => Buffer::from_slice(&[1i64, 2], [2]),
            };
            comm.shift(whole, 1).map(drop)
        });
        assert_eq!(told, 2, "{error}");
    }
}

#[test]
fn returning_early_is_noticed_at_once() {
    let Failure { error, told, took } = common::fails(3, TIMEOUT, |comm| {
        comm.barrier()?;
        if comm.rank() == 2 {
            return Ok(());
        }
        comm.all_reduce(tensor(&[4])).map(drop)
    });
    assert!(took < TIMEOUT);
    assert_eq!(told, 2);
    assert!(matches!(error, CommError::Departed { rank: 2, .. }));
    contains(
        &error,
        &[
            "rank 2 has returned, yet others wait for it: rank ",
            " is in all_reduce over world (call 1) at ",
            "rank 2: finished, its last collective was barrier over world (call 0) at ",
        ],
    );
}

#[test]
fn what_was_posted_before_returning_still_counts_on_threads() {
    let config = ThreadsConfig {
        ranks: 2,
        timeout: TIMEOUT,
    };
    let received = launch(&config, |comm| {
        let pending = comm
            .start(
                vec![Transfer {
                    op: Collective::Shift { by: 1 },
                    buffer: tensor(&[comm.rank() + 1]),
                }],
                Site::here(),
            )
            .unwrap();
        if comm.rank() == 0 {
            return 0; // Forgoes its own result.
        }
        std::thread::sleep(TIMEOUT / 4);
        pending.wait().unwrap()[0].num_elements()
    });
    assert_eq!(received.unwrap(), [0, 1]);
}

#[test]
fn an_error_in_a_nested_group_fails_the_world() {
    let Failure { error, told, took } = common::fails(5, TIMEOUT, |comm| {
        if comm.rank() == 4 {
            return comm.barrier(); // Has nothing to do with the group that fails.
        }
        let four = comm.subgroup(&[3, 2, 1, 0], "ring")?;
        let pair = four.subgroup(if comm.rank() < 2 { &[0, 1] } else { &[3, 2] }, "ulysses")?;
        pair.all_reduce(tensor(&[if comm.rank() == 3 { 2 } else { 1 }]))?;
        four.barrier()
    });
    assert!(took < TIMEOUT);
    assert_eq!(told, 5);
    contains(
        &error,
        &[
            "rank 3: all_reduce over ulysses [2, f32]",
            "rank 2: all_reduce over ulysses [1, f32]",
        ],
    );
}

#[test]
fn a_failed_world_stays_failed() {
    let (error, told) = fails(2, |comm| {
        if comm.rank() == 0 {
            comm.abort(CommError::Aborted {
                message: "the loss is not finite".into(),
            });
            comm.abort(CommError::Aborted {
                message: "too late".into(),
            });
        }
        let first = comm.barrier().unwrap_err();
        assert_eq!(comm.subgroup(&[0, 1], "x").err(), Some(first.clone()));
        assert_eq!(comm.all_reduce(tensor(&[1])).err(), Some(first.clone()));
        Err(first)
    });
    assert_eq!(told, 2);
    assert_eq!(error.to_string(), "aborted: the loss is not finite");
}

#[test]
fn an_error_returned_by_a_rank_on_threads() {
    let config = ThreadsConfig {
        ranks: 3,
        timeout: TIMEOUT,
    };
    let outcome = try_launch(&config, |comm| -> Result<(), String> {
        if comm.rank() == 1 {
            return Err("no such file: data/train.bin".into());
        }
        comm.barrier().map_err(|error| error.to_string())
    });
    assert_eq!(
        outcome.unwrap_err().to_string(),
        "rank 1 failed: no such file: data/train.bin"
    );
}

#[test]
fn arguments_that_cannot_work_are_refused_before_anything_is_sent_on_threads() {
    let refusals = launch(
        &ThreadsConfig {
            ranks: 2,
            timeout: TIMEOUT,
        },
        |comm| {
            let parts = Parts::contiguous(5, 2);
            let rank = comm.rank();
            let own = parts.len_of(rank);
            let refused = [
                comm.all_gather(tensor(&[2, own + 1]), 1, &parts),
                comm.all_gather(tensor(&[2, own]), 2, &parts),
                comm.all_gather(tensor(&[2, own]), 1, &Parts::contiguous(5, 3)),
                comm.all_gather(tensor(&[1]), 0, &Parts::new(vec![vec![0..1], vec![2..3]])),
                comm.reduce_scatter(tensor(&[4]), 0, &parts),
                comm.all_to_all(tensor(&[own, 5]), (0, &parts), (1, &Parts::contiguous(6, 2))),
                comm.all_to_all(tensor(&[own]), (0, &parts), (0, &Parts::contiguous(6, 2))),
                comm.broadcast(tensor(&[1]), 2),
                comm.run(vec![], Site::here()).map(|_| Buffer::empty()),
                comm.run(
                    [Collective::AllReduce, Collective::Barrier]
                        .map(|op| Transfer {
                            op,
                            buffer: tensor(&[1]),
                        })
                        .into_iter()
                        .collect(),
                    Site::here(),
                )
                .map(|_| Buffer::empty()),
            ];
            let strangers = [&[1 - rank][..], &[rank, 7], &[rank, rank]].map(|ranks| comm.subgroup(ranks, "x").err());
            // Nothing was sent, so the group is as good as new.
            assert_eq!(comm.all_reduce(tensor(&[1])).unwrap().to_vec::<f32>(), [2.0]);
            let errors = refused.into_iter().map(|result| result.err());
            errors
                .chain(strangers)
                .map(|error| error.expect("refused"))
                .collect::<Vec<_>>()
        },
    );
    let refusals = refusals.unwrap().remove(0);
    assert!(refusals.iter().all(|error| matches!(error, CommError::Invalid { .. })));
    let words = [
        "rank 0: all_gather over world at ",
        "there is no dim 2 in shape [2, 3]",
        "the parts are for 3 ranks, the group has 2",
        "no rank owns 1..2 of the dimension",
        "dim 0 of shape [4] has length 4, but the whole that the parts describe has length 5",
        "dim 1 of shape [3, 5] has length 5, but the whole that the parts describe has length 6",
        "the new parts reach to 6, the old ones only to 5",
        "root 2 is not one of the 2 ranks",
        "no tensor was given",
        "one call is of one kind, but barrier is packed with it",
        "does not contain the rank that asks for it",
        "rank 7 is not in the group [0, 1]",
        "names rank 0 twice",
    ];
    assert_eq!(refusals.len(), words.len());
    refusals
        .iter()
        .zip(words)
        .for_each(|(error, word)| contains(error, &[word]));
    contains(
        &refusals[0],
        &["dim 1 of shape [2, 4] has length 4, but this rank's part has length 3"],
    );
}

#[test]
fn members_must_agree_on_a_subgroup() {
    let (error, told) = fails(3, |comm| match comm.rank() {
        0 => comm.subgroup(&[0, 2], "tp")?.barrier(),
        1 => comm.barrier(),
        _ => comm.subgroup(&[2, 0], "tp")?.barrier(),
    });
    assert_eq!(told, 3);
    contains(
        &error,
        &[
            "disagree on the subgroup: ",
            "subgroup [0, 2] over tp",
            "subgroup [2, 0] over tp",
        ],
    );
}

#[test]
fn no_ranks_are_refused_and_one_needs_no_one_on_threads() {
    let config = |ranks| ThreadsConfig {
        ranks,
        timeout: TIMEOUT,
    };
    assert!(matches!(launch(&config(0), |_| ()), Err(CommError::Invalid { .. })));
    let name = launch(&config(1), |comm| {
        comm.barrier().unwrap();
        std::thread::current().name().map(String::from)
    });
    assert_eq!(name.unwrap(), [Some("rank 0".to_string())]);
}

#[test]
fn many_worlds_at_once_do_not_meet_on_threads() {
    std::thread::scope(|scope| {
        for world in 0..4 {
            scope.spawn(move || {
                let config = ThreadsConfig {
                    ranks: 3,
                    timeout: Duration::from_secs(20),
                };
                let outcome = launch(&config, |comm| {
                    for round in 0..50 {
                        if world == 3 && round == 25 && comm.rank() == 1 {
                            panic!("only this world");
                        }
                        let sum = comm
                            .all_reduce(Buffer::from_slice(&[world], [1]))
                            .unwrap_or_else(|e| raise(e));
                        assert_eq!(sum.to_vec::<i32>(), [3 * world]);
                    }
                });
                assert_eq!(outcome.is_err(), world == 3);
            });
        }
    });
}

#[cfg(feature = "mpi")]
#[test]
fn over_mpi() {
    common::failing_again_over_mpi(&["on_threads"]);
}
