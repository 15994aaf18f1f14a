//! One rank's way through Burn's training loop.

use std::ops::{ControlFlow, RangeInclusive};
use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::Module;
use burn::optim::GradientsAccumulator;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, SupervisedTrainingEventProcessor, TrainLoader, TrainingItem, ValidLoader,
};
use burn_sp_comm::{CommError, Communicator, Site, raise};

use super::agree::{alike, anyone, everyones, words_of};
use super::feed::{Feed, Next, Pass};
use super::strategy::failure;
use super::whole::whole_learner;
use super::{SpModel, SpStep};

/// What the ranks of a process have in common.
pub(super) struct Run<M: SpStep> {
    pub train: TrainLoader<SpModel<M>>,
    pub valid: ValidLoader<SpModel<M>>,
    pub epochs: RangeInclusive<usize>,
    pub accumulation: Option<usize>,
    pub interrupter: Interrupter,
    pub store: Arc<EventStoreClient>,
    /// Whether there are checkpoints.
    pub checkpoints: bool,
    pub site: Site,
}

/// What rank 0 alone has.
pub(super) struct Lead<M: SpStep> {
    pub events: SupervisedTrainingEventProcessor<SpModel<M>>,
    pub checkpointer: Option<LearningCheckpointer<SpModel<M>>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// A rank at work.
pub(super) struct Rank<'a, M: SpStep> {
    pub run: &'a Run<M>,
    pub world: Arc<dyn Communicator>,
    pub feed: &'a Feed<M::Input>,
    pub learner: &'a mut Learner<SpModel<M>>,
    pub lead: Option<&'a mut Lead<M>>,
    /// Whether ranks share out parameters.
    pub shared: bool,
}

/// What metrics see next.
type Event<M> = LearnerEvent<<M as SpStep>::Output>;

impl<M: SpStep> Rank<'_, M> {
    /// Trains.
    pub fn run(mut self) {
        self.compare();
        for epoch in self.run.epochs.clone() {
            if self.epoch(epoch).is_break() {
                break;
            }
        }
    }

    /// Fails if ranks, as processes may, were given what would make their updates different. (Burn shows nothing of an
    /// optimizer's own settings.)
    fn compare(&self) {
        let run = self.run;
        let mut next = self.learner.clone();
        next.lr_step();
        let given = [
            ("the first epoch", *run.epochs.start() as f64),
            ("the last epoch", *run.epochs.end() as f64),
            ("the number of steps to an update", run.accumulation.unwrap_or(1) as f64),
            (
                "the number of checkpoints an epoch",
                f64::from(u8::from(run.checkpoints)),
            ),
            (
                "the norm to clip at",
                self.learner.model().max_norm().unwrap_or(f64::INFINITY),
            ),
            ("the learning rate", next.lr_current().base()),
        ];
        alike(given, self.world.as_ref(), run.site);
    }

    fn epoch(&mut self, epoch: usize) -> ControlFlow<()> {
        let Run { train, valid, .. } = self.run;
        let start = |total_items| LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items,
        };
        self.tell_train(|| start(train.num_items()));
        let trained = self.train();
        self.tell_train(|| LearnerEvent::EndSplit(epoch));
        trained?;

        self.tell_valid(|| start(valid.num_items()));
        let validated = self.validate();
        self.tell_valid(|| LearnerEvent::EndSplit(epoch));
        self.tell_train(|| LearnerEvent::EndEpoch(epoch));
        validated?;
        if let Some(lead) = &mut self.lead {
            self.run.interrupter.fail_on_error(lead.events.flush());
        }
        self.agree(0)?;

        self.checkpoint(epoch);
        let early = self.lead.as_mut().and_then(|lead| lead.early_stopping.as_mut());
        let early = early.is_some_and(|early| early.should_stop(epoch, &self.run.store));
        self.stop_if(early)
    }

    /// Stops all ranks if one of them is to.
    fn stop_if(&self, own: bool) -> ControlFlow<()> {
        match anyone(own, self.world.as_ref(), self.run.site) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// An update for each item, or for as many as are accumulated.
    fn train(&mut self) -> ControlFlow<()> {
        let (run, feed) = (self.run, self.feed);
        let mut pass = feed.pass(run.train.as_ref(), true);
        let (mut accumulator, mut accumulated) = (GradientsAccumulator::new(), 0);
        for iteration in 1.. {
            let Some((item, progress)) = self.next(&mut pass)? else {
                break;
            };
            let output = self.learner.train_step(item);
            let grads = match run.accumulation {
                Some(accumulation) => {
                    accumulator.accumulate(&self.learner.model(), output.grads);
                    accumulated += 1;
                    let full = accumulation <= accumulated || progress.is_completed();
                    full.then(|| accumulator.grads())
                }
                None => Some(output.grads),
            };
            if let Some(grads) = grads {
                self.learner.lr_step();
                self.learner.optimizer_step(grads);
                accumulated = 0;
            }
            let lr = self.learner.lr_current();
            let item = || TrainingItem::new(output.item, progress, Some(iteration), Some(lr));
            self.tell_train(|| LearnerEvent::ProcessedItem(item()));
        }
        ControlFlow::Continue(())
    }

    fn validate(&mut self) -> ControlFlow<()> {
        let feed = self.feed;
        let mut pass = feed.pass(self.run.valid.as_ref(), false);
        let model = self.learner.model().valid();
        for iteration in 1.. {
            let Some((item, progress)) = self.next(&mut pass)? else {
                break;
            };
            let output = InferenceStep::step(&model, item);
            let item = || TrainingItem::new(output, progress, Some(iteration), None);
            self.tell_valid(|| LearnerEvent::ProcessedItem(item()));
        }
        ControlFlow::Continue(())
    }

    /// The next item, which every rank has, none at the end; or all ranks stop.
    fn next(&self, pass: &mut Pass<'_, M::Input>) -> ControlFlow<(), Option<(M::Input, Progress)>> {
        let next = pass.next::<M>(&self.run.interrupter).unwrap_or_else(|| self.lost());
        self.agree(match &next {
            Next::Item(_, progress) => 1 + progress.items_processed as u64,
            Next::End | Next::Failed => 0,
        })?;
        ControlFlow::Continue(match next {
            Next::Item(item, progress) => Some((item, progress)),
            Next::End | Next::Failed => None,
        })
    }

    /// Goes on if all ranks are at this place of their data and have the same learning rate. All stop if the interrupter of
    /// one has been told to, and then those of all have been, in the same words.
    fn agree(&self, place: u64) -> ControlFlow<()> {
        const STOPPED: u64 = u64::MAX;
        const FAILED: u64 = u64::MAX - 1;
        let interrupter = &self.run.interrupter;
        let place = match (interrupter.should_stop(), interrupter.error()) {
            (false, _) => place,
            (true, None) => STOPPED,
            (true, Some(_)) => FAILED,
        };
        let rate = self.learner.lr_current().base();
        let (world, site) = (self.world.as_ref(), self.run.site);
        let all = everyones([place, rate.to_bits()], world, site);
        for (code, failed) in [(FAILED, true), (STOPPED, false)] {
            if let Some(rank) = all.iter().position(|[place, _]| *place == code) {
                self.stop(rank, failed);
                return ControlFlow::Break(());
            }
        }
        let Some(rank) = all.iter().position(|other| *other != all[0]) else {
            return ControlFlow::Continue(());
        };
        let named = |place| match place {
            0 => "at the end of its data".to_owned(),
            place => format!("at item {}", place - 1),
        };
        let ([here, rate], [there, other]) = (all[0], all[rank]);
        let error = match here == there {
            true => format!(
                "its learning rate is {} where that of rank 0 is {}",
                f64::from_bits(other),
                f64::from_bits(rate)
            ),
            false => format!(
                "it is {} where rank 0 is {}; ranks that are processes need the same data in the same order: the same seed, \
                 and one worker of a data loader at most",
                named(there),
                named(here)
            ),
        };
        raise(CommError::failed(rank, error))
    }

    /// Tells this process's interrupter what that of a rank was told.
    fn stop(&self, rank: usize, failed: bool) {
        let interrupter = &self.run.interrupter;
        let own = || match (interrupter.error(), interrupter.get_message()) {
            (Some(error), _) => error.to_string(),
            (None, Some(reason)) => format!("rank {rank} stopped: {reason}"),
            (None, None) => format!("rank {rank} stopped"),
        };
        let own = (self.world.rank() == rank).then(own);
        let words = words_of(rank, own, self.world.as_ref(), self.run.site);
        if failed && interrupter.error().is_none() {
            interrupter.fail(failure(&CommError::failed(rank, words).into(), false));
        } else if !interrupter.should_stop() {
            interrupter.stop(Some(&words));
        }
    }

    /// The rank that reads the data has failed: what has happened, as every rank reports it.
    fn lost(&self) -> ! {
        let error = self.world.barrier().err();
        raise(error.unwrap_or_else(|| CommError::failed(self.world.rank(), "no rank reads the data")))
    }

    /// Saves the whole model, if there are checkpoints. Collective.
    fn checkpoint(&mut self, epoch: usize) {
        if !self.run.checkpoints {
            return;
        }
        let whole = match self.shared {
            true => whole_learner(self.learner),
            false => None,
        };
        let checkpointer = self.lead.as_mut().and_then(|lead| lead.checkpointer.as_mut());
        if let Some(checkpointer) = checkpointer {
            checkpointer.checkpoint(whole.as_ref().unwrap_or(self.learner), epoch, &self.run.store);
        }
    }

    fn tell_train(&mut self, event: impl FnOnce() -> Event<M>) {
        if let Some(lead) = &mut self.lead {
            self.run.interrupter.fail_on_error(lead.events.process_train(event()));
        }
    }

    fn tell_valid(&mut self, event: impl FnOnce() -> Event<M>) {
        if let Some(lead) = &mut self.lead {
            self.run.interrupter.fail_on_error(lead.events.process_valid(event()));
        }
    }
}
