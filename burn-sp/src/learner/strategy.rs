use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::tensor::Device;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::train::WorkerFailure;
use burn::train::{
    Interruption, Learner, LearningResult, SupervisedLearningStrategy, SupervisedTraining,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingError, TrainingStrategy, ValidLoader,
};
use burn_sp_comm::{CommError, Site, raise};

use super::edit::edit;
use super::feed::{Feed, feeds};
use super::model::Seat;
use super::rank::{Lead, Rank, Run};
use super::silent::Silent;
use super::whole::{Shared, own_moments};
use super::{SpModel, SpStep};
use crate::launch::check;
use crate::one_model::of_first;
use crate::train::{ParamShards, whole_module};
use crate::{Engine, Error, LaunchConfig, RankDevices, SpDevice, initialize, launch};

/// Trains over a mesh in Burn's own training loop; see the [module](super).
#[derive(Clone, Debug)]
pub struct SequenceParallel {
    config: LaunchConfig,
    /// By rank, with autodiff.
    devices: Vec<Device>,
    /// The ranks of this process.
    here: Range<usize>,
    site: Site,
}

impl SequenceParallel {
    /// Ranks started like this, on these devices; they need not have autodiff.
    ///
    /// # Errors
    /// If there can be no such mesh, or the engine cannot be used.
    #[track_caller]
    pub fn new<D: RankDevices + ?Sized>(config: LaunchConfig, devices: &D) -> Result<Self, Error> {
        let here = check(&config)?;
        let autodiff = |rank| match devices.of_rank(rank) {
            device if device.is_autodiff() => device.clone(),
            device => device.clone().autodiff(),
        };
        Ok(Self {
            devices: (0..config.mesh.ranks()).map(autodiff).collect(),
            config,
            here,
            site: Site::here(),
        })
    }

    /// Whether rank 0, which alone draws and writes, is in this process.
    pub fn is_first(&self) -> bool {
        self.here.start == 0
    }

    /// Makes a training use this strategy, and where ranks are processes, keeps all but that of rank 0 from showing and
    /// logging. Call it last, so that it has the last word. Where ranks are threads,
    /// `with_training_strategy(strategy.into())` does the same.
    ///
    /// A launcher of processes gives none a terminal of its own, and Burn's dashboard would stop the process that draws it:
    /// rank 0 gets Burn's plain renderer there. One of your own is given after this, if [`is_first`](Self::is_first).
    #[doc(alias = "with_training_strategy")]
    pub fn lead<M: SpStep>(self, training: SupervisedTraining<SpModel<M>>) -> SupervisedTraining<SpModel<M>> {
        let training = match (self.config.engine, self.is_first()) {
            (Engine::Threads, _) => training,
            (_, true) => training.renderer(Box::new(CliMetricsRenderer::new())),
            (_, false) => training
                .renderer(Box::new(Silent))
                .with_progress_logger(Silent)
                .with_metric_logger(InMemoryMetricLogger::new())
                .with_application_logger(None),
        };
        training.with_training_strategy(self.into())
    }
}

impl<M: SpStep> From<SequenceParallel> for TrainingStrategy<SpModel<M>> {
    fn from(strategy: SequenceParallel) -> Self {
        TrainingStrategy::Custom(Arc::new(strategy))
    }
}

type Events<M> = SupervisedTrainingEventProcessor<SpModel<M>>;

impl<M: SpStep> SupervisedLearningStrategy<SpModel<M>> for SequenceParallel {
    fn train(
        &self,
        learner: Learner<SpModel<M>>,
        train: TrainLoader<SpModel<M>>,
        valid: ValidLoader<SpModel<M>>,
        components: TrainingComponents<SpModel<M>>,
    ) -> LearningResult<SpModel<M>> {
        let remembering = Remembering {
            strategy: self,
            end: RefCell::default(),
        };
        let mut result = remembering.train(learner, train, valid, components);
        let (interrupted, error) = remembering.end.take();
        result.error = result.error.or(error);
        result.interrupted = match result.error {
            Some(_) => None,
            None => result.interrupted.or(interrupted),
        };
        result
    }

    fn fit(
        &self,
        components: TrainingComponents<SpModel<M>>,
        learner: Learner<SpModel<M>>,
        train: TrainLoader<SpModel<M>>,
        valid: ValidLoader<SpModel<M>>,
        starting_epoch: usize,
    ) -> (SpModel<M>, Events<M>) {
        self.fit_ranks(components, learner, train, valid, starting_epoch)
    }
}

/// The strategy, with how training ended: Burn's dashboard makes the interrupter forget it.
struct Remembering<'a> {
    strategy: &'a SequenceParallel,
    end: RefCell<(Option<Interruption>, Option<Arc<TrainingError>>)>,
}

impl<M: SpStep> SupervisedLearningStrategy<SpModel<M>> for Remembering<'_> {
    fn fit(
        &self,
        components: TrainingComponents<SpModel<M>>,
        learner: Learner<SpModel<M>>,
        train: TrainLoader<SpModel<M>>,
        valid: ValidLoader<SpModel<M>>,
        starting_epoch: usize,
    ) -> (SpModel<M>, Events<M>) {
        let interrupter = components.interrupter.clone();
        let fitted = self
            .strategy
            .fit_ranks(components, learner, train, valid, starting_epoch);
        self.end.replace((interrupter.interruption(), interrupter.error()));
        fitted
    }
}

impl SequenceParallel {
    fn fit_ranks<M: SpStep>(
        &self,
        components: TrainingComponents<SpModel<M>>,
        learner: Learner<SpModel<M>>,
        train: TrainLoader<SpModel<M>>,
        valid: ValidLoader<SpModel<M>>,
        starting_epoch: usize,
    ) -> (SpModel<M>, Events<M>) {
        let devices = &self.devices[self.here.clone()];
        let run = Run {
            // As Burn does it, and no more: a shuffled loader draws at each call.
            train: train.to_device(&devices[0]),
            valid: valid.to_device(&devices[0].clone().inner()),
            epochs: starting_epoch..=components.num_epochs,
            accumulation: components.grad_accumulation,
            interrupter: components.interrupter,
            store: components.event_store,
            checkpoints: components.checkpointer.is_some(),
            site: self.site,
        };
        let lead = Mutex::new(Lead {
            events: components.event_processor,
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
        });
        let mut learner = learner;
        initialize(&learner.model());
        if learner.model().devices().iter().all(|device| !device.is_autodiff()) {
            edit(&mut learner, |model, _| (model.train(), ()));
        }
        let fork = |device: &Device| {
            let mut own = learner.clone();
            own.fork(device);
            Mutex::new(own)
        };
        // Outside the ranks, so that a failure leaves the last model.
        let learners: Vec<_> = devices.iter().map(fork).collect();
        // Where ranks share out parameters, the last whole model: that of the beginning, until the end.
        let whole = Mutex::new(Some(learner.model().into_inner()));
        drop(learner);
        let feeds: Vec<_> = feeds(devices).into_iter().map(|feed| Mutex::new(Some(feed))).collect();

        let outcome = launch(&self.config, &self.devices, |device| {
            let (rank, index) = (device.rank(), device.rank() - self.here.start);
            let feed = taken(&feeds[index]);
            let mut learner = locked(&learners[index]);
            let mut lead = (rank == 0).then(|| locked(&lead));
            let shared = self.seat(&mut learner, &device, &run);
            if !shared {
                locked(&whole).take();
            }
            Rank {
                run: &run,
                world: device.mesh().world().clone(),
                feed: &feed,
                learner: &mut learner,
                lead: lead.as_deref_mut(),
                shared,
            }
            .run();
            if shared {
                self.gather(&learner.model(), &whole);
            }
        });
        if let Err(error) = outcome {
            run.interrupter.fail(failure(&error, run.checkpoints));
        }
        let learner = learners.into_iter().next().expect("a process has ranks");
        let model = learner.into_inner().unwrap_or_else(PoisonError::into_inner).model();
        let whole = whole.into_inner().unwrap_or_else(PoisonError::into_inner);
        let whole = whole.unwrap_or_else(|| model.inner().clone());
        let lead = lead.into_inner().unwrap_or_else(PoisonError::into_inner);
        (model.seated(whole, None), lead.events)
    }

    /// Whether this process is one of several.
    fn is_process(&self) -> bool {
        self.here.len() < self.devices.len()
    }

    /// Puts together what ranks share out, in the whole model of each process. Collective.
    fn gather<M: SpStep>(&self, part: &SpModel<M>, whole: &Mutex<Option<M>>) {
        let Seat { device, layouts } = part.seat();
        let trained = whole_module(part.inner(), layouts, &ParamShards::default(), device);
        let was = |whole: &Mutex<Option<M>>| locked(whole).clone().expect("the model of the beginning is kept");
        if let Some(trained) = trained {
            let model = was(whole)
                .try_load_record(trained.into_record())
                .unwrap_or_else(|error| {
                    let error = format!("learner: SpStep::shard has moved parameters, whose paths must stay: {error}");
                    raise(CommError::failed(device.rank(), error))
                });
            locked(whole).replace(model);
        }
        if self.is_process() {
            let model = of_first(was(whole), device.mesh().world().as_ref(), self.site);
            locked(whole).replace(model);
        }
    }

    /// Gives a rank's learner, which has the whole model, its place on the mesh and its part. Returns whether ranks share
    /// out parameters.
    fn seat<M: SpStep>(&self, learner: &mut Learner<SpModel<M>>, device: &SpDevice, run: &Run<M>) -> bool {
        let (device, site, checkpoints) = (device.clone(), self.site, run.checkpoints);
        let processes = self.is_process();
        edit(learner, move |model, optimizer| {
            let mut whole = model.inner().clone();
            if processes {
                whole = of_first(whole, device.mesh().world().as_ref(), site);
            }
            let (part, layouts) = whole.shard(&device);
            let seat = Seat { device, layouts };
            let shared = Shared::of(&part, &seat);
            if !shared.some {
                return (model.seated(part, Some(seat)), false);
            }
            let refuse = |why: String| -> ! { raise(CommError::failed(seat.device.rank(), why)) };
            if optimizer.has_gradient_clipping() {
                refuse(
                    "learner: the optimizer clips gradients parameter by parameter, of which ranks hold parts; leave that out \
                     and use SpModel::with_clipping"
                        .into(),
                );
            }
            if let Some(path) = shared.nothing_of.filter(|_| checkpoints) {
                refuse(format!(
                    "learner: it has nothing of {path}, so its optimizer's state cannot go into Burn's checkpoints; use a \
                     smaller tp"
                ));
            }
            *optimizer = optimizer
                .clone()
                .load_record(own_moments(optimizer.to_record(), &part, &seat));
            (model.seated(part, Some(seat)), true)
        })
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn taken<I>(feed: &Mutex<Option<Feed<I>>>) -> Feed<I> {
    locked(feed).take().expect("each rank takes its own feed once")
}

/// The report, as Burn's learner tells it.
pub(super) fn failure(error: &Error, checkpoints: bool) -> TrainingError {
    let (rank, hint) = match error {
        Error::Comm(CommError::Panic { rank, .. } | CommError::Failed { rank, .. } | CommError::Died { rank, .. }) => {
            (*rank, "")
        }
        Error::Comm(CommError::Timeout { .. }) if checkpoints => (
            0,
            "; if rank 0 was saving a checkpoint, give LaunchConfig::with_timeout more than a save takes",
        ),
        _ => (0, ""),
    };
    TrainingError::Workers(vec![WorkerFailure {
        device_id: rank,
        message: format!("{error}{hint}"),
    }])
}
