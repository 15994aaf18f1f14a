//! Training a byte-level transformer by Burn's own training loop, on any mesh.

use std::path::PathBuf;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn::train::{Learner, SupervisedTraining};
use burn_sp::attention::{KvMove, Mask};
use burn_sp::comm::CommError;
use burn_sp::layout::{Axis, Placement};
use burn_sp::learner::{SequenceParallel, SpModel, SpStep, TokenBatcher, TokenItem, TokenMetric, TokenOutput};
use burn_sp::train::{LossShare, ParamLayouts, valid_tokens};
use burn_sp::{SpDevice, launch, seeded};
use burn_sp_models::transformer::{ForwardOptions, Transformer};
use clap::Parser;
use serde::{Deserialize, Serialize};

use crate::config::{TrainConfig, at_least_one, refuse};
use crate::everyone::agree;
use crate::flags::{LearningFlags, ModelFlags, RunFlags, TrainFlags};
use crate::text::Text;
use crate::{InputError, RunError};

/// Windows of held-out text for validation, at most.
const VALIDATION_WINDOWS: usize = 16;

/// Trains a small transformer on text by Burn's own training loop, its sequences split over ranks.
///
/// With no flags: 2 ranks, a small Llama, 2 epochs, and the sources and documentation of the workspace as its text. In a
/// terminal it shows Burn's dashboard.
#[derive(Parser, Clone, Debug, Default, Serialize, Deserialize)]
#[command(name = "learner", version, args_override_self = true)]
pub struct LearnerFlags {
    /// The run; --steps are those of an epoch.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunFlags,

    /// The model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelFlags,

    /// UTF-8 files, or folders of them [default: the workspace's own sources and documentation]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Option<Vec<PathBuf>>,

    /// Learning rate of AdamW, constant [default: 0.001]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub lr: Option<f64>,

    /// Largest global norm of the gradients; 0 turns clipping off [default: 1]
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub clip: Option<f64>,

    /// How often it sees the same --steps [default: 2]
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,

    /// Where metrics and checkpoints go [default: learner]
    #[arg(long, value_name = "DIR")]
    pub folder: Option<PathBuf>,

    /// Go on after this epoch, from its checkpoint in the folder, on any mesh
    #[arg(long, value_name = "EPOCH")]
    pub checkpoint: Option<usize>,
}

impl AsMut<RunFlags> for LearnerFlags {
    fn as_mut(&mut self) -> &mut RunFlags {
        &mut self.run
    }
}

/// A training run.
#[derive(Clone, Debug)]
pub struct LearnerConfig {
    train: TrainConfig,
    epochs: usize,
    folder: PathBuf,
    checkpoint: Option<usize>,
}

impl LearnerFlags {
    /// Completes the flags and checks them, all but the text itself.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self) -> Result<LearnerConfig, InputError> {
        if self.run.report.is_some() || self.run.trace.is_some() {
            return refuse("--report, --trace: what there is to say lies in --folder; leave them out");
        }
        let dropout = [self.model.dropout, self.model.attention_dropout];
        if dropout.into_iter().flatten().any(|dropout| dropout != 0.0) {
            return refuse("--dropout: it is keyed by steps, which Burn's loop does not number; leave it out");
        }
        let train = TrainFlags {
            run: self.run.clone(),
            model: self.model.clone(),
            text: self.text.clone(),
            learning: LearningFlags {
                lr: self.lr,
                clip: self.clip,
                ..LearningFlags::default()
            },
            ..TrainFlags::default()
        };
        let epochs = at_least_one("--epochs", self.epochs, 2)?;
        let folder = self.folder.clone().unwrap_or_else(|| "learner".into());
        if let Some(checkpoint) = self.checkpoint {
            let file = folder.join("checkpoint").join(format!("model-{checkpoint}.bpk"));
            if !file.is_file() {
                return refuse(format!("--checkpoint {checkpoint}: there is no {}", file.display()));
            }
            if epochs <= checkpoint {
                return refuse(format!(
                    "--checkpoint {checkpoint} --epochs {epochs}: they count the epochs before too; use --epochs {} at least",
                    checkpoint + 1
                ));
            }
        }
        Ok(LearnerConfig {
            train: train.resolve()?,
            epochs,
            folder,
            checkpoint: self.checkpoint,
        })
    }
}

impl LearnerConfig {
    /// What must be the same on every rank.
    fn value(&self) -> serde_json::Value {
        let mut value = serde_json::to_value(&self.train).unwrap_or_default();
        value["epochs"] = self.epochs.into();
        value["checkpoint"] = self.checkpoint.into();
        value
    }
}

/// What Burn trains: a transformer, and what its forward pass depends on beside tokens.
#[derive(Module, Debug)]
struct Language {
    transformer: Transformer,
    #[module(skip)]
    mask: Mask,
    #[module(skip)]
    kv: KvMove,
}

impl SpStep for Language {
    type Input = TokenItem;
    type Output = TokenOutput;

    fn step(&self, item: TokenItem, device: &SpDevice) -> (LossShare, TokenOutput) {
        let batch = item.distribute(device);
        let count = valid_tokens([&batch.labels]);
        let options = ForwardOptions {
            mask: self.mask.clone(),
            kv: self.kv,
            ..ForwardOptions::default()
        };
        let tokens = batch.tokens;
        let loss = self.transformer.loss(tokens.clone(), &batch.labels, count, &options);
        let output = TokenOutput::new(&loss, count);
        if device.device().is_autodiff() {
            return (loss, output);
        }
        // In validation also how often it is right, which needs all logits at once.
        let logits = self.transformer.logits(tokens, &options);
        let logits = logits.redistribute(Axis::Tp, Placement::Replicate);
        (loss, output.with_correct(&logits, &batch.labels))
    }

    fn shard(self, device: &SpDevice) -> (Self, ParamLayouts) {
        let (transformer, layouts) = self.transformer.shard(device);
        (Self { transformer, ..self }, layouts)
    }

    fn move_item(item: TokenItem, _device: &Device) -> TokenItem {
        item
    }
}

/// Trains as configured.
///
/// # Errors
/// If the text is too short or the mesh cannot be (before any rank starts), ranks were started with different flags or
/// texts, or fail.
pub fn train(config: &LearnerConfig) -> Result<(), RunError> {
    let (run, learning) = (&config.train.run, &config.train.learning);
    let text = Text::read(config.train.text.as_deref())?;
    text.check(run.seq_len)?;
    let devices = run.devices()?;
    launch(&run.launch(), &devices, |device| {
        agree(&config.value(), &text.digest(), device.mesh().world().as_ref());
    })?;
    let windows = (run.steps * run.accumulate * run.batch) as u64;
    let window = |sample| tokens(text.window(run.seed, 0, sample, run.seq_len));
    let training = SupervisedTraining::new(
        &config.folder,
        DataLoaderBuilder::new(TokenBatcher::rows())
            .batch_size(run.batch)
            .shuffle(run.seed)
            .build(InMemDataset::new((0..windows).map(window).collect())),
        DataLoaderBuilder::new(TokenBatcher::rows())
            .batch_size(run.batch)
            .build(InMemDataset::new(held_out(&text, config)?)),
    )
    .metrics((TokenMetric::loss(), TokenMetric::perplexity()))
    .metric_valid_numeric(TokenMetric::accuracy())
    .grads_accumulation(run.accumulate)
    .num_epochs(config.epochs)
    .with_default_checkpointers()
    .summary();
    let training = match config.checkpoint {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };

    let cpu = Device::flex().autodiff();
    let model = Language {
        transformer: seeded(&cpu, run.seed, |device| config.train.model().init(device)),
        mask: config.train.mask(),
        kv: run.kv_move(),
    };
    let model = SpModel::new(model);
    let model = match learning.clip {
        0.0 => model,
        clip => model.with_clipping(clip),
    };
    let optimizer = AdamWConfig::new().with_beta_2(0.95).with_weight_decay(0.1).init();
    let result = SequenceParallel::new(run.launch(), &devices)?
        .lead(training)
        .launch(Learner::new(model, optimizer, learning.lr));
    match result.error {
        Some(error) => Err(burn_sp::Error::from(CommError::invalid(error.to_string())).into()),
        None => Ok(()),
    }
}

/// Bytes are tokens.
fn tokens(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().copied().map(u32::from).collect()
}

/// Windows at even distances over what is held out.
fn held_out(text: &Text, config: &LearnerConfig) -> Result<Vec<Vec<u32>>, InputError> {
    let (run, held_out) = (&config.train.run, text.held_out());
    let width = held_out.len().min(run.seq_len + 1);
    if !run.mesh().fits(width - 1) {
        return refuse(format!(
            "text: {width} bytes are held out, too few for each rank of {} to have one; give more text",
            run.mesh()
        ));
    }
    let count = (held_out.len() / width).min(VALIDATION_WINDOWS);
    let offset = |index: usize| index * (held_out.len() - width) / (count - 1).max(1);
    Ok((0..count)
        .map(|index| tokens(&held_out[offset(index)..][..width]))
        .collect())
}
