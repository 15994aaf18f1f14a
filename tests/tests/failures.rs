//! Cases 33 and 34: whatever one rank does wrong, every rank ends with the same report, in time.

mod common;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use burn_sp::attention::{AttentionOptions, attention};
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::{LaunchConfig, SpDevice, SpTensor, launch};
use common::{contains, ranks, sequence};

const TIMEOUT: Duration = Duration::from_millis(300);

/// Runs ranks of which one fails; returns the report, having checked that it came in time.
fn fails(mesh: MeshShape, body: impl Fn(&SpDevice) + Send + Sync) -> String {
    let config = LaunchConfig::new(mesh).with_timeout(TIMEOUT);
    let begin = Instant::now();
    let outcome = launch(&config, &Device::flex().autodiff(), |device| body(&device));
    let error = outcome.expect_err("a rank failed").to_string();
    // Generous for a loaded machine, and far below what a hang would take.
    assert!(begin.elapsed() < TIMEOUT * 20, "took {:?}", begin.elapsed());
    error
}

fn sharded(device: &SpDevice, columns: usize) -> (Tensor<2>, SpTensor<2>) {
    let layout = Layout::replicated([8, columns]).shard(0, Axis::Ulysses, Split::Contiguous);
    let local: [usize; 2] = layout.local_shape(device.mesh()).try_into().expect("two dimensions");
    let leaf = Tensor::<2>::ones(local, device.device()).require_grad();
    (leaf.clone(), SpTensor::from_local(leaf, layout, device))
}

#[test]
fn a_rank_that_panics_in_forward() {
    for ranks in 2..=4 {
        let report = fails(MeshShape::ulysses(ranks), |device| {
            assert!(device.rank() != 1, "token {} is not in the vocabulary", 77);
            sharded(device, 2).1.gather();
        });
        contains(
            &report,
            &[
                "rank 1 panicked at ",
                "failures.rs:",
                "token 77 is not in the vocabulary",
            ],
        );
    }
}

/// The collective is in the backward of the gather; the rank dies in its own code before.
#[test]
fn a_rank_that_panics_between_forward_and_backward() {
    let report = fails(MeshShape::ulysses(4), |device| {
        let loss = sharded(device, 2).1.gather().into_local().sum();
        assert!(device.rank() != 2, "out of memory");
        loss.backward();
    });
    contains(&report, &["rank 2 panicked at ", "failures.rs:", "out of memory"]);
}

/// Ranks whose graphs differ: one rank's loss does not use the gathered value.
#[test]
fn a_rank_with_another_backward() {
    let report = fails(MeshShape::ulysses(3), |device| {
        let (leaf, x) = sharded(device, 2);
        let whole = x.redistribute(Axis::Ulysses, Placement::Replicate).into_local();
        if device.rank() == 1 {
            // Without the gathered value its collective is missing from backward.
            leaf.sum().backward();
        } else {
            whole.sum().backward();
        }
    });
    contains(
        &report,
        &["rank 1", "reduce_scatter over ulysses", "backward of ", "failures.rs:"],
    );
}

#[test]
fn a_rank_that_comes_late() {
    let report = fails(MeshShape::ulysses(3), |device| {
        if device.rank() == 2 {
            std::thread::sleep(TIMEOUT * 2);
        }
        sharded(device, 2).1.gather();
    });
    contains(
        &report,
        &["timeout", "rank 2", "rank 0", "all_gather over ulysses", "failures.rs:"],
    );
}

#[test]
fn a_rank_that_is_late_in_backward() {
    let report = fails(MeshShape::ulysses(2), |device| {
        let loss = sharded(device, 2).1.gather().into_local().sum();
        if device.rank() == 0 {
            std::thread::sleep(TIMEOUT * 2);
        }
        loss.backward();
    });
    contains(
        &report,
        &[
            "timeout",
            "rank 0",
            "reduce_scatter over ulysses",
            "backward of ",
            "failures.rs:",
        ],
    );
}

#[test]
fn a_rank_that_calls_another_collective() {
    let report = fails(MeshShape::ulysses(3), |device| {
        let x = sharded(device, 3).1;
        match device.rank() {
            1 => drop(x.redistribute(Axis::Ulysses, Placement::Shard(1))),
            _ => drop(x.redistribute(Axis::Ulysses, Placement::Replicate)),
        }
    });
    contains(
        &report,
        &[
            "the ranks of a group disagree on the operation",
            "rank 1: all_to_all over ulysses [3, 3, f32] at ",
            // Of rank 0 or rank 2, whichever was there first.
            ": all_gather over ulysses [",
            "failures.rs:",
        ],
    );
}

#[test]
fn a_rank_that_passes_another_shape() {
    let report = fails(MeshShape::ulysses(2), |device| {
        sharded(device, 2 + device.rank()).1.gather();
    });
    contains(
        &report,
        &[
            "the ranks of a group disagree on the shape",
            "rank 0: all_gather over ulysses [4, 2, f32] at ",
            "rank 1: all_gather over ulysses [4, 3, f32] at ",
            "failures.rs:",
        ],
    );
}

#[test]
fn a_rank_that_passes_another_dtype() {
    let report = fails(MeshShape::ulysses(2), |device| {
        let dtype = if device.rank() == 0 { DType::F32 } else { DType::F64 };
        sharded(device, 2).1.tokenwise(|x| x.cast(dtype)).gather();
    });
    contains(
        &report,
        &["disagree on the dtype", "rank 0: ", "rank 1: ", "failures.rs:"],
    );
}

#[test]
fn a_rank_that_splits_otherwise() {
    let report = fails(MeshShape::ulysses(2), |device| {
        let split = if device.rank() == 0 {
            Split::Zigzag
        } else {
            Split::Contiguous
        };
        let layout = Layout::replicated([8]).shard(0, Axis::Ulysses, split);
        SpTensor::from_local(Tensor::<1>::ones([4], device.device()), layout, device).gather();
    });
    contains(
        &report,
        &[
            "disagree on the parameters",
            "[0..2 6..8 | 2..6]",
            "[0..4 | 4..8]",
            "failures.rs:",
        ],
    );
}

#[test]
fn a_rank_that_leaves_early() {
    let report = fails(MeshShape::ulysses(2), |device| {
        if device.rank() == 0 {
            sharded(device, 2).1.gather();
        }
    });
    contains(
        &report,
        &[
            "rank 1 has returned, yet others wait for it",
            "all_gather over ulysses",
            "failures.rs:",
        ],
    );
}

/// In attention too, forward and backward, the report names the user's line.
#[test]
fn attention_that_one_rank_leaves_out() {
    for (mesh, operation) in [
        (MeshShape::ulysses(2), "all_to_all over ulysses"),
        (MeshShape::ring(2), "over ring"),
    ] {
        for in_backward in [false, true] {
            let report = fails(mesh, |device| {
                let layout = sequence([1, 4, 2, 2], Split::Contiguous);
                let leaf = Tensor::<4>::ones([1, 2, 2, 2], device.device()).require_grad();
                let x = SpTensor::from_local(leaf, layout, device);
                let lazy = device.rank() == 1;
                if lazy && !in_backward {
                    std::thread::sleep(TIMEOUT * 2);
                }
                let out = attention(x.clone(), x.clone(), x, &AttentionOptions::default());
                if lazy && in_backward {
                    std::thread::sleep(TIMEOUT * 2);
                }
                out.into_local().sum().backward();
            });
            contains(&report, &["timeout", "rank 1", operation, "failures.rs:"]);
            assert_eq!(report.contains("backward of "), in_backward, "{report}");
        }
    }
}

/// All ranks get the very same report: it is what each of them unwinds with.
#[test]
fn every_rank_unwinds_with_the_same_report() {
    let reports = Mutex::new(Vec::new());
    let report = fails(MeshShape::ulysses(4), |device| {
        let waiting = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert!(device.rank() != 3, "broken");
            sharded(device, 2).1.gather();
        }));
        let payload = waiting.expect_err("every rank fails");
        if let Some(error) = payload.downcast_ref::<burn_sp::comm::CommError>() {
            reports
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .push(error.to_string());
        }
        std::panic::resume_unwind(payload);
    });
    let reports = reports.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    assert_eq!(reports, vec![report; 3]);
}

/// Case 33: many forward and backward rounds with 2 to 8 ranks finish, though every rank waits for every other.
#[test]
fn many_rounds_finish() {
    for size in 2..=8 {
        for round in ranks(MeshShape::ring(size), |device| {
            let layout = Layout::replicated([1, 9, 3, 2]).shard(1, Axis::Ring, Split::Zigzag);
            let local: [usize; 4] = layout.local_shape(device.mesh()).try_into().expect("four dimensions");
            for _ in 0..20 {
                let leaf = Tensor::<4>::ones(local, device.device()).require_grad();
                let x = SpTensor::from_local(leaf.clone(), layout.clone(), &device);
                let out = attention(x.clone(), x.clone(), x, &AttentionOptions::default());
                let grads = out.gather().into_local().sum().backward();
                assert!(leaf.grad(&grads).is_some());
            }
            20
        }) {
            assert_eq!(round, 20);
        }
    }
}
