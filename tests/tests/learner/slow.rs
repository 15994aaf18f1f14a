//! A save that takes longer than ranks wait.

use std::thread;
use std::time::{Duration, Instant};

use burn::train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError};
use burn_sp::learner::{SequenceParallel, TokenMetric};

use super::run::Run;
use crate::common::{config, contains, device, mesh};

/// Saves nothing, slowly.
struct Slow(Duration);

impl<R: Checkpoint> Checkpointer<R> for Slow {
    fn save(&self, _epoch: usize, _record: R) -> Result<(), CheckpointerError> {
        thread::sleep(self.0);
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing was saved".into()))
    }
}

#[test]
fn the_report_says_what_to_do() {
    // The mesh is not that of the run, as the strategy is not.
    let run = Run::new("slow", None);
    let strategy = SequenceParallel::new(config(mesh(1, 1, 2)).with_timeout(Duration::from_secs(1)), &device());
    let start = Instant::now();
    let result = run.run_with(|training| {
        let slow = || Slow(Duration::from_secs(4));
        let training = training.metrics((TokenMetric::loss(),));
        let training = training.with_custom_checkpointers(slow(), slow(), slow());
        strategy.unwrap().lead(training)
    });
    assert!(start.elapsed() < Duration::from_secs(40));
    let error = result.error.expect("rank 1 does not wait for so long").to_string();
    contains(
        &error,
        &[
            "timeout: ",
            "waited 1000 ms",
            "if rank 0 was saving a checkpoint, give LaunchConfig::with_timeout",
        ],
    );
}
