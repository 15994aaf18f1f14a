//! Burn's own training loop, [`burn::train`], on any mesh: its metrics, checkpoints, early stopping, interrupter and
//! terminal dashboard, with the tokens of every item shared out over ranks.
//!
//! A model implements [`SpStep`] instead of Burn's `TrainStep` and `InferenceStep`: one step, given the whole item and this
//! rank's [`SpDevice`](crate::SpDevice), that returns this rank's share of the loss. It is trained inside [`SpModel`], by a
//! [`SequenceParallel`]:
//!
//! ```
//! use burn::data::{dataloader::DataLoaderBuilder, dataset::InMemDataset};
//! use burn::module::Module;
//! use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! use burn::tensor::Device;
//! use burn::train::{Learner, SupervisedTraining};
//! use burn_sp::learner::{SequenceParallel, SpModel, SpStep, TokenBatcher, TokenItem, TokenMetric, TokenOutput};
//! use burn_sp::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Bigrams {
//!     embedding: Embedding,
//!     output: Linear,
//! }
//!
//! impl SpStep for Bigrams {
//!     type Input = TokenItem;
//!     type Output = TokenOutput;
//!
//!     fn step(&self, item: TokenItem, device: &SpDevice) -> (LossShare, TokenOutput) {
//!         let batch = item.distribute(device);
//!         let hidden = batch.tokens.tokenwise(|tokens| self.embedding.forward(tokens));
//!         let loss = cross_entropy(hidden, self.output.weight.val(), &batch.labels);
//!         let output = TokenOutput::new(&loss, valid_tokens([&batch.labels]));
//!         (loss, output)
//!     }
//! }
//!
//! // Windows of 6 tokens: 5 to read, and the one after each.
//! let windows = |count| InMemDataset::new((0..count).map(|i| (i..i + 6).map(|id| id % 5).collect()).collect());
//! let loader = |count: u32| DataLoaderBuilder::new(TokenBatcher::rows()).batch_size(4).build::<InMemDataset<Vec<u32>>>(windows(count));
//! let folder = std::env::temp_dir().join(format!("learner-{}", std::process::id()));
//! let training = SupervisedTraining::new(&folder, loader(10), loader(3))
//!     .metrics((TokenMetric::loss(), TokenMetric::perplexity()))
//!     .with_application_logger(None)
//!     .num_epochs(2);
//!
//! let config = LaunchConfig::new(MeshShape::ulysses(2));
//! let model = Bigrams {
//!     embedding: EmbeddingConfig::new(5, 8).init(&Device::flex()),
//!     output: LinearConfig::new(8, 5).with_bias(false).init(&Device::flex()),
//! };
//! let result = SequenceParallel::new(config, &Device::flex())?
//!     .lead(training)
//!     .launch(Learner::new(SpModel::new(model), AdamWConfig::new().init(), 1e-2));
//! assert!(result.error.is_none());
//! let trained: Bigrams = result.model.into_inner();
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<(), burn_sp::Error>(())
//! ```
//!
//! # Why a trait and a wrapper
//! `TrainStep::step` is not told where it runs, and Burn's learner shows its optimizer to nobody but the model's
//! `optimize`. A wrapper knows both: it hands each step its [`SpDevice`](crate::SpDevice) (a thread-local one would be
//! invisible where it matters), it sums the gradients before the optimizer sees them, and it lets checkpoints put together
//! what ranks share out. A user's model stays free of all this: no field, no closure, and one implementation where Burn asks
//! for two. Parameters have the same paths as without it, so its checkpoints are those of the model. Under Burn's own
//! strategies it is a mesh of one rank.
//!
//! # What it does as Burn does, and what not
//! - Every rank gets every item, in the order in which one device would get it, shuffled or not, and takes its samples and
//!   tokens: the data set is covered once, whatever the mesh. Ranks that are threads share one loader. Ranks that are
//!   processes each read their own, so give `num_workers` at most 1: several workers deliver in whatever order they finish.
//!   (That ranks are at different places is noticed, that they got other data there is not.)
//! - Where ranks are processes, rank 0 has no terminal to draw the dashboard in, and gets Burn's plain renderer: see
//!   [`SequenceParallel::lead`].
//! - Ranks that are processes must be given the same. What Burn shows of a training (epochs, accumulation, whether there are
//!   checkpoints, clipping by [`SpModel`], and the learning rate at every update) is compared, and named where it differs; an
//!   optimizer's own settings cannot be. Weights are those of rank 0.
//! - Gradients are sums over ranks and over the steps that `grads_accumulation` names; learning rate schedulers are asked once
//!   an update.
//! - Burn's gradient clipping, which an optimizer brings, looks at one parameter at a time, and where `tp` splits it, at this
//!   rank's part: that is refused. [`SpModel::with_clipping`] clips by the norm of all gradients of all ranks.
//! - The learner's optimizer updates whole parameters, or a `tp` rank's parts:
//!   [`ShardedOptimizer`](crate::train::ShardedOptimizer) and [`shard_parameters`](crate::train::shard_parameters), which share
//!   out more, are for loops of one's own.
//! - Rank 0 alone tells metrics, renderer, checkpointer and early stopping; what they decide, and a stop or an error of any
//!   rank's interrupter, data that cannot be read say, ends all ranks before the next item, with the same words. What an
//!   item tells the metrics must be the same on every rank, as [`TokenOutput`] is.
//! - A checkpoint holds the whole model and the whole state of the optimizer, so it goes on on any mesh, or with Burn alone.
//!   Ranks that are processes all read it, so it must lie where all hosts see it. (Burn loads the optimizer's state to its
//!   default device; from there it moves at the first update.) With parameters that ranks share out, all ranks put them
//!   together after every epoch, in host memory of rank 0 alone. A process keeps the whole model that it began with, on the
//!   device on which it was made, and in the end puts the weights into it.
//! - Training that goes on from a checkpoint begins to shuffle anew, as Burn's loaders do: its first epoch has the order of
//!   the first epoch, not of the one that would be next. Another seed in the loader gives another order.
//! - `SupervisedTraining::gradient_checkpointing` reaches Burn's own strategies only; give [`SequenceParallel::new`] devices
//!   with it.
//! - Ranks wait for rank 0's metrics and checkpoint no longer than for anything else, for 60 seconds unless
//!   [`LaunchConfig::with_timeout`](crate::LaunchConfig::with_timeout) says otherwise. Burn saves while training goes on, but one
//!   checkpoint at a time: if the last one is not on the disk when the next one is due, rank 0 waits for it, and so do all. A
//!   save that takes longer than an epoch and the timeout together ends training.
//! - A rank that fails ends the training with the report as `LearningResult::error`, and the model as it was after the last
//!   update (where ranks share out parameters: as it was at first).

mod agree;
mod edit;
mod feed;
mod item;
mod metric;
mod model;
mod moments;
mod output;
mod rank;
mod silent;
mod strategy;
mod whole;

pub use item::{TokenBatcher, TokenItem};
pub use metric::TokenMetric;
pub use model::{SpModel, SpStep};
pub use output::TokenOutput;
pub use strategy::SequenceParallel;
