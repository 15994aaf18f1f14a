//! When training ends before its last epoch, and how.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::{
    EarlyStoppingStrategy, Interrupter, Learner, MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining,
};
use burn_sp::layout::MeshShape;
use burn_sp::learner::{SequenceParallel, SpModel, TokenItem, TokenMetric};

use super::model::{Hook, Language, Windows, llama, windows};
use super::run::{Run, whole};
use crate::common::{config, contains, device, mesh};

/// A loss that falls is no better where more is better: two epochs without improvement end it.
#[test]
fn early_stopping_stops_all_ranks() {
    for mesh in [None, Some(mesh(2, 1, 2)), Some(MeshShape::tp(2))] {
        let run = Run {
            epochs: 6,
            ..Run::new("early", mesh)
        };
        let metric = TokenMetric::loss();
        let early = MetricEarlyStoppingStrategy::new(
            &metric,
            Aggregate::Mean,
            Direction::Highest,
            Split::Train,
            StoppingCondition::NoImprovementSince { n_epochs: 2 },
        );
        let result = run.run_with(|training| training.metrics((metric,)).early_stopping(early));
        assert!(result.interrupted.is_none());
        whole(result);
        assert_eq!(run.epochs_logged(), 3, "{mesh:?}");
    }
}

/// Counts its own calls: only rank 0 is asked.
#[derive(Clone)]
struct Never(Arc<std::sync::atomic::AtomicUsize>);

impl EarlyStoppingStrategy for Never {
    fn should_stop(&mut self, _epoch: usize, _store: &EventStoreClient) -> bool {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        false
    }
}

#[test]
fn early_stopping_is_asked_once_an_epoch() {
    let never = Never(Arc::default());
    let asked = never.0.clone();
    let run = Run::new("asked", mesh(1, 1, 3));
    whole(run.run_with(|training| training.early_stopping(never)));
    assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 2);
}

/// Whoever asks, all stop after the step in which it was asked for.
#[test]
fn a_stop_that_one_rank_asks_for_stops_all() {
    for by in 0..4 {
        let interrupter = Interrupter::new();
        let stopping = interrupter.clone();
        let run = Run {
            hook: Hook::new(move |rank, step| {
                if (rank, step) == (by, 2) {
                    stopping.stop(Some("enough"));
                }
            }),
            ..Run::new(&format!("stopped-{by}"), mesh(2, 1, 2))
        };
        let result = run.run_with(|training| training.metrics((TokenMetric::loss(),)).with_interrupter(interrupter));
        assert_eq!(result.interrupted.as_ref().unwrap().reason.as_deref(), Some("enough"));
        whole(result);
        assert_eq!(run.logged("train", "Loss", 1).steps.len(), 2);
        assert!(!run.folder.join("valid").exists());
    }
}

#[test]
fn a_panic_of_a_rank_ends_the_run_with_a_report() {
    for (mesh, by) in [(mesh(2, 1, 2), 3), (mesh(1, 2, 1), 0), (MeshShape::tp(2), 1)] {
        let run = Run {
            hook: Hook::new(move |rank, step| {
                if (rank, step) == (by, 3) {
                    panic!("no more");
                }
            }),
            ..Run::new("panicked", mesh)
        };
        let start = Instant::now();
        let result = run.run();
        assert!(start.elapsed() < Duration::from_secs(30), "{mesh}: it waits");
        let error = result.error.expect("a rank fails").to_string();
        contains(&error, &[&format!("rank {by} panicked"), "no more", "ending.rs"]);
        assert!(result.interrupted.is_none());
        // What was there before counts.
        run.has_steps(2);
        // And the model can be used: whole, on no mesh.
        let expected = llama().init(&device()).num_params();
        assert_eq!(result.model.num_params(), expected);
    }
}

/// Its items can be read up to one.
#[derive(Clone, Copy)]
enum Torn {
    Fails,
    Panics,
}

impl Dataset<Vec<i64>> for Torn {
    fn get(&self, index: usize) -> Result<Vec<i64>, DatasetError> {
        match (index, self) {
            (0..4, _) => Ok(windows(4, 9, 0).swap_remove(index)),
            (_, Torn::Fails) => Err(DatasetError::new(std::io::Error::other("torn"))),
            (_, Torn::Panics) => panic!("torn apart"),
        }
    }

    fn len(&self) -> usize {
        8
    }
}

/// One rank reads for all: the others must not wait for it.
#[test]
fn data_that_cannot_be_read_end_the_run() {
    for (torn, words) in [(Torn::Fails, "torn"), (Torn::Panics, "rank 0 panicked")] {
        let run = Run::new("torn", mesh(1, 1, 3));
        let loader = || -> Arc<dyn DataLoader<TokenItem>> { DataLoaderBuilder::new(Windows).batch_size(2).build(torn) };
        let training = SupervisedTraining::new(&run.folder, loader(), loader())
            .metrics((TokenMetric::loss(),))
            .with_application_logger(None);
        let strategy = SequenceParallel::new(config(mesh(1, 1, 3)), &device()).unwrap();
        let model = SpModel::new(Language {
            transformer: llama().init(&device()),
            hook: Hook::default(),
        });
        let learner = Learner::new(model, burn::optim::SgdConfig::new().init(), 0.1);
        let start = Instant::now();
        let result = training.with_training_strategy(strategy.into()).launch(learner);
        assert!(start.elapsed() < Duration::from_secs(30), "it waits");
        contains(&result.error.unwrap().to_string(), &["torn", words]);
        run.has_steps(2);
    }
}

#[test]
fn what_cannot_work_is_refused() {
    let run = Run {
        local_clipping: true,
        ..Run::new("local-clipping", MeshShape::tp(2))
    };
    let error = run.run().error.unwrap().to_string();
    contains(
        &error,
        &["clips gradients parameter by parameter", "SpModel::with_clipping"],
    );
    // Where every rank has all, it is what it is on one device.
    let locally = |mesh| Run {
        local_clipping: true,
        ..Run::new("locally-clipped", mesh)
    };
    let (one, two) = (locally(None), locally(Some(mesh(1, 1, 2))));
    whole(one.run());
    whole(two.run());
    two.same_losses(&one);

    let error = SequenceParallel::new(config(MeshShape::ulysses(0)), &device()).unwrap_err();
    contains(&error.to_string(), &["ulysses is 0"]);

    let run = Run {
        length: 3,
        ..Run::new("short", mesh(1, 2, 2))
    };
    let error = run.run().error.unwrap().to_string();
    contains(&error, &["rows of 3 tokens", "a rank would have no token"]);

    let run = Run {
        checkpoints: true,
        ..Run::new("nothing", MeshShape::tp(4))
    };
    let error = run.run().error.unwrap().to_string();
    contains(&error, &["rank 3 failed", "has nothing of", "smaller tp"]);
}

/// After training a model is whole, on the first rank's device, and steps alone.
#[test]
fn the_trained_model_is_whole() {
    let one = whole(Run::new("trained", None).run());
    let parameters = |model: &SpModel<Language>| -> Vec<f64> {
        let weights = [
            &model.inner().transformer.embedding.weight,
            &model.inner().transformer.head.as_ref().unwrap().weight,
        ];
        let data = weights.map(|weight: &burn::module::Param<Tensor<2>>| weight.val().into_data());
        data.iter()
            .flat_map(|data| data.iter::<f64>().collect::<Vec<_>>())
            .collect()
    };
    let expected = parameters(&one);
    for mesh in [mesh(2, 1, 1), MeshShape::tp(2), MeshShape::tp(3).with_dp(2)] {
        let model = whole(Run::new("trained", mesh).run());
        let found = parameters(&model);
        assert_eq!(found.len(), expected.len());
        for (one, other) in expected.iter().zip(&found) {
            assert!((one - other).abs() <= 2e-4, "{mesh}: {one} {other}");
        }
        let batch: TokenItem = burn::data::dataloader::batcher::Batcher::batch(&Windows, windows(2, 9, 0), &device());
        let output = burn::train::InferenceStep::step(&model, batch);
        assert!(output.loss.is_finite() && output.tokens > 0);
    }
}
