use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{LossMetric, Metric, MetricDefinition, MetricMetadata, Numeric, NumericEntry};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};
use burn_sp::layout::MeshShape;
use burn_sp::learner::{TokenMetric, TokenOutput};

use super::model::{labels, windows};
use super::run::{Logged, Run, whole};
use crate::common::mesh;

/// By hand: 2 tokens of mean 4 and 6 of mean 1 have mean (8 + 6) / 8; of 1 and 3 correct, half are.
#[test]
fn tokens_are_weighted_alike() {
    let steps = [(4.0, 2, 1), (1.0, 6, 3)].map(|(loss, tokens, correct)| TokenOutput {
        loss,
        tokens,
        correct: Some(correct),
    });
    let empty = TokenOutput {
        loss: 0.0,
        tokens: 0,
        correct: None,
    };
    let metrics = [
        (TokenMetric::loss(), 1.75, "4,2"),
        (TokenMetric::perplexity(), 1.75_f64.exp(), "54.598150033144236,2"),
        (TokenMetric::accuracy(), 50.0, "50,2"),
    ];
    for (mut metric, expected, first) in metrics {
        let metadata = || MetricMetadata {
            progress: burn::data::dataloader::Progress::new(0, 1, None),
            iteration: None,
            lr: None,
        };
        let logged = steps.map(|step| metric.update(&step, &metadata()).unwrap().serialized);
        assert_eq!(logged[0], first);
        assert!(metric.update(&empty, &metadata()).unwrap().is_not_available());
        let NumericEntry::Final(value) = metric.final_value() else {
            panic!("not final");
        };
        assert!((value - expected).abs() < 1e-12 * expected, "{value} {expected}");
        assert_eq!(metric.compute().unwrap().serialized, format!("{value},final"));
        metric.clear();
        assert!(metric.compute().unwrap().is_not_available());
    }
}

/// As many entries as steps, with the tokens of all ranks as their weights, and the mean of the epoch from them.
#[test]
fn all_ranks_are_counted_once() {
    let expected: Vec<usize> = windows(6, 11, 0).chunks(2).map(labels).collect();
    assert!(expected.windows(2).any(|pair| pair[0] != pair[1]));
    for mesh in [None, Some(mesh(2, 1, 2)), Some(MeshShape::tp(2).with_ring(2))] {
        let run = Run::new("counted", mesh);
        whole(run.run());
        for epoch in [1, 2] {
            let Logged { steps, epoch: mean } = run.logged("train", "Loss", epoch);
            let tokens: Vec<usize> = steps.iter().map(|(_, tokens)| *tokens).collect();
            assert_eq!(tokens, expected, "{mesh:?}");
            let sum: f64 = steps.iter().map(|(loss, tokens)| loss * *tokens as f64).sum();
            let by_hand = sum / expected.iter().sum::<usize>() as f64;
            assert!((mean - by_hand).abs() <= 1e-12 * mean, "{mesh:?}: {mean} {by_hand}");
            let perplexity = run.logged("train", "Perplexity", epoch).epoch;
            assert!((perplexity - mean.exp()).abs() <= 1e-12 * perplexity);
        }
    }
}

/// Correct labels are whole numbers, so shares of ranks either add up or do not.
#[test]
fn accuracy_is_that_of_one_device() {
    let one = Run::new("accuracy", None);
    whole(one.run());
    let expected = one.logged("valid", "Accuracy", 2);
    assert!(expected.epoch > 0.0, "it learns nothing");
    for mesh in [mesh(2, 1, 1), mesh(1, 2, 2), MeshShape::tp(2)] {
        let run = Run::new("accuracy", mesh);
        whole(run.run());
        let found = run.logged("valid", "Accuracy", 2);
        assert_eq!(
            (found.steps, found.epoch),
            (expected.steps.clone(), expected.epoch),
            "{mesh}"
        );
    }
}

/// Burn's own metric gets one value a step.
#[test]
fn burns_loss_metric_works_as_on_one_device() {
    let one = Run::new("loss-metric", None);
    whole(one.run_with(|training| training.metrics((LossMetric::new(),))));
    let run = Run::new("loss-metric", mesh(1, 1, 2));
    whole(run.run_with(|training| training.metrics((LossMetric::new(),))));
    run.same_losses(&one);
    assert!(
        run.logged("train", "Loss", 1)
            .steps
            .iter()
            .all(|(_, weight)| *weight == 1)
    );
}

/// Counts what it is to show.
#[derive(Clone, Default)]
struct Counting(Arc<[AtomicUsize; 4]>);

impl Counting {
    fn count(&self, what: usize) {
        self.0[what].fetch_add(1, Ordering::Relaxed);
    }
}

impl MetricsRenderer for Counting {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _definition: MetricDefinition) {}
}

impl MetricsRendererTraining for Counting {
    fn update_train(&mut self, _state: MetricState) {
        self.count(0);
    }
    fn update_valid(&mut self, _state: MetricState) {
        self.count(1);
    }
    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn core::error::Error>> {
        assert!(summary.is_some());
        Ok(())
    }
}

impl MetricsRendererEvaluation for Counting {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl TrainingProgressLogger for Counting {
    fn start(&mut self, _epochs: usize, _first: usize, _items: Option<usize>, _label: Option<&str>) {
        self.count(2);
    }
    fn update_epoch(&mut self, _epoch: usize) {}
    fn start_split(&mut self, _split: &str, _items: usize) {}
    fn update_split(&mut self, _items: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {
        self.count(3);
    }
    fn log_event_training(&mut self, _event: String) {}
}

impl EvaluationProgressLogger for Counting {
    fn start_global_progress(&mut self, _tests: usize) {}
    fn start_test(&mut self, _name: &str, _items: usize) {}
    fn update_test_progress(&mut self, _items: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _event: String) {}
}

#[test]
fn one_rank_draws() {
    let counts = [None, Some(mesh(2, 1, 2))].map(|mesh| {
        let counting = Counting::default();
        let shown = counting.clone();
        whole(Run::new("drawn", mesh).run_with(|training| {
            let metrics = (TokenMetric::loss(),);
            training.metrics(metrics).renderer(Box::new(counting)).summary()
        }));
        shown.0.each_ref().map(|count| count.load(Ordering::Relaxed))
    });
    // Three steps and the epoch's value, two steps and one.
    assert_eq!(counts, [[8, 6, 1, 1]; 2]);
}
