//! A training as a user writes it, on any mesh or by Burn's own strategy.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn::train::{Learner, LearningResult, SupervisedTraining};
use burn_sp::layout::MeshShape;
use burn_sp::learner::{SequenceParallel, SpModel, TokenMetric};
use burn_sp::seeded;
use burn_sp_models::transformer::TransformerConfig;

use super::model::{Hook, Language, Windows, llama, windows};
use crate::common::{config, device};

pub type Trained = SpModel<Language>;
pub type Training = SupervisedTraining<Trained>;

#[derive(Clone, Debug)]
pub struct Run {
    pub folder: PathBuf,
    /// None: Burn's own strategy.
    pub mesh: Option<MeshShape>,
    pub model: TransformerConfig,
    pub hook: Hook,
    /// Windows for training; there are 3 for validation.
    pub count: i64,
    pub length: i64,
    pub batch: usize,
    pub epochs: usize,
    pub shuffle: Option<u64>,
    pub workers: usize,
    pub accumulation: Option<usize>,
    pub clipping: Option<f64>,
    pub local_clipping: bool,
    pub resumed: Option<usize>,
    pub checkpoints: bool,
    pub seed: u64,
}

impl Run {
    pub fn new(name: &str, mesh: impl Into<Option<MeshShape>>) -> Self {
        let mesh = mesh.into();
        let mesh_name = mesh.map_or("burn".into(), |mesh| mesh.to_string().replace(' ', "-"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("learner");
        let folder = folder.join(name).join(mesh_name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Self {
            folder,
            mesh,
            model: llama(),
            hook: Hook::default(),
            count: 6,
            length: 11,
            batch: 2,
            epochs: 2,
            shuffle: None,
            workers: 0,
            accumulation: None,
            clipping: None,
            local_clipping: false,
            resumed: None,
            checkpoints: false,
            seed: 5,
        }
    }

    /// With token-weighted metrics.
    pub fn run(&self) -> LearningResult<Trained> {
        let metrics = (TokenMetric::loss(), TokenMetric::perplexity(), TokenMetric::accuracy());
        self.run_with(|training| training.metrics(metrics))
    }

    pub fn run_with(&self, change: impl FnOnce(Training) -> Training) -> LearningResult<Trained> {
        let loader = |count, seed| {
            let builder = DataLoaderBuilder::new(Windows)
                .batch_size(self.batch)
                .num_workers(self.workers);
            let builder = match self.shuffle {
                Some(seed) => builder.shuffle(seed),
                None => builder,
            };
            builder.build(InMemDataset::new(windows(count, self.length, seed)))
        };
        let training = SupervisedTraining::new(&self.folder, loader(self.count, 0), loader(3, 1))
            .num_epochs(self.epochs)
            .with_application_logger(None);
        let training = match self.checkpoints {
            true => training.with_default_checkpointers(),
            false => training,
        };
        let training = match self.accumulation {
            Some(accumulation) => training.grads_accumulation(accumulation),
            None => training,
        };
        let training = change(match self.resumed {
            Some(epoch) => training.checkpoint(epoch),
            None => training,
        });
        let training = match self.mesh {
            Some(mesh) => SequenceParallel::new(config(mesh), &device()).unwrap().lead(training),
            None => training,
        };
        training.launch(self.learner())
    }

    fn learner(&self) -> Learner<Trained> {
        let device: Device = device().autodiff();
        let transformer = seeded(&device, self.seed, |device| self.model.init(device));
        let hook = self.hook.clone();
        let model = SpModel::new(Language { transformer, hook });
        let model = match self.clipping {
            Some(max_norm) => model.with_clipping(max_norm),
            None => model,
        };
        let clipping = self.local_clipping.then_some(GradientClippingConfig::Norm(1.0));
        let optimizer = AdamWConfig::new().with_weight_decay(0.1).with_grad_clipping(clipping);
        let lr = LinearLrSchedulerConfig::new(0.02, 0.002, 12).init().unwrap();
        Learner::new(model, optimizer.init(), lr)
    }

    /// What was logged: a value and its weight for each step, or that it is final.
    fn lines(&self, split: &str, metric: &str, epoch: usize) -> Vec<(f64, String)> {
        let file = self.folder.join(split).join(format!("epoch-{epoch}"));
        let text = fs::read_to_string(file.join(format!("{metric}.log"))).unwrap_or_default();
        let parts = text.lines().map(|line| line.split_once(',').unwrap());
        parts
            .map(|(value, weight)| (value.parse().unwrap(), weight.to_owned()))
            .collect()
    }

    /// What was logged of an epoch, which is over. Burn writes files on a thread that it does not wait for.
    pub fn logged(&self, split: &str, metric: &str, epoch: usize) -> Logged {
        let is_final = |(_, weight): &(f64, String)| weight == "final";
        let mut lines = Vec::new();
        eventually(|| {
            lines = self.lines(split, metric, epoch);
            lines.last().is_some_and(is_final)
        });
        let (last, _) = lines.pop().unwrap();
        let weighted = |(value, weight): (f64, String)| (value, weight.parse().unwrap());
        Logged {
            steps: lines.into_iter().map(weighted).collect(),
            epoch: last,
        }
    }

    /// So many steps of the first epoch were logged.
    pub fn has_steps(&self, count: usize) {
        eventually(|| {
            let lines = self.lines("train", "Loss", 1);
            lines.iter().filter(|(_, weight)| weight != "final").count() == count
        });
    }

    /// The epochs of which there is anything.
    pub fn epochs_logged(&self) -> usize {
        let there = |epoch: &usize| self.folder.join("train").join(format!("epoch-{epoch}")).exists();
        (1..).take_while(there).count()
    }

    /// Losses of all steps of training in an epoch, and of its validation.
    pub fn losses(&self, epoch: usize) -> Vec<f64> {
        let of = |split| self.logged(split, "Loss", epoch);
        let (train, valid) = (of("train"), of("valid"));
        let steps = train.steps.iter().chain(&valid.steps).map(|(loss, _)| *loss);
        steps.chain([train.epoch, valid.epoch]).collect()
    }

    /// The same, up to rounding, as those of another run.
    #[track_caller]
    pub fn same_losses(&self, other: &Run) {
        for epoch in 1..=self.epochs {
            self.same_epoch(other, epoch);
        }
    }

    #[track_caller]
    pub fn same_epoch(&self, other: &Run, epoch: usize) {
        let (own, others) = (self.losses(epoch), other.losses(epoch));
        assert_eq!(own.len(), others.len(), "{self:?}");
        for (one, other) in own.iter().zip(&others) {
            assert!(
                (one - other).abs() <= 1e-5 * other.abs(),
                "{:?}, epoch {epoch}: {own:?} {others:?}",
                self.mesh
            );
        }
    }
}

pub struct Logged {
    pub steps: Vec<(f64, usize)>,
    pub epoch: f64,
}

/// A result without a failure.
#[track_caller]
pub fn whole(result: LearningResult<Trained>) -> Trained {
    if let Some(error) = result.error {
        panic!("{error}");
    }
    result.model
}

#[track_caller]
fn eventually(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(10), "it is not logged");
        thread::sleep(Duration::from_millis(5));
    }
}
