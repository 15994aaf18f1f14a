//! A tiny transformer that Burn trains, and its data.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::batcher::Batcher;
use burn::module::Module;
use burn::tensor::Device;
use burn_sp::SpDevice;
use burn_sp::data::IGNORED;
use burn_sp::layout::{Axis, Placement};
use burn_sp::learner::{SpStep, TokenItem, TokenOutput};
use burn_sp::train::{LossShare, ParamLayouts, valid_tokens};
use burn_sp_models::transformer::{ForwardOptions, Transformer, TransformerConfig};

/// Of 3 heads: no even share for 2 ranks.
pub fn llama() -> TransformerConfig {
    TransformerConfig::llama(17, 18, 2, 3, 11)
}

#[derive(Module, Debug)]
pub struct Language {
    pub transformer: Transformer,
    #[module(skip)]
    pub hook: Hook,
}

/// What happens in a step beside it: called with the rank and how many steps of training it has begun.
#[derive(Clone)]
pub struct Hook {
    call: Arc<dyn Fn(usize, usize) + Send + Sync>,
    steps: Arc<[AtomicUsize; 8]>,
}

impl Hook {
    pub fn new(call: impl Fn(usize, usize) + Send + Sync + 'static) -> Self {
        Self {
            call: Arc::new(call),
            steps: Arc::default(),
        }
    }
}

impl Default for Hook {
    fn default() -> Self {
        Self::new(|_, _| {})
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

impl SpStep for Language {
    type Input = TokenItem;
    type Output = TokenOutput;

    fn step(&self, batch: TokenItem, device: &SpDevice) -> (LossShare, TokenOutput) {
        if device.device().is_autodiff() {
            let step = self.hook.steps[device.rank()].fetch_add(1, Ordering::Relaxed) + 1;
            (self.hook.call)(device.rank(), step);
        }
        let batch = batch.distribute(device);
        let count = valid_tokens([&batch.labels]);
        let options = ForwardOptions {
            mask: batch.mask,
            ..ForwardOptions::default()
        };
        let loss = self
            .transformer
            .loss(batch.tokens.clone(), &batch.labels, count, &options);
        let output = TokenOutput::new(&loss, count);
        if device.device().is_autodiff() {
            return (loss, output);
        }
        let logits = self.transformer.logits(batch.tokens, &options);
        let logits = logits.redistribute(Axis::Tp, Placement::Replicate);
        (loss, output.with_correct(&logits, &batch.labels))
    }

    fn shard(self, device: &SpDevice) -> (Self, ParamLayouts) {
        let (transformer, layouts) = self.transformer.shard(device);
        (Self { transformer, ..self }, layouts)
    }
}

/// Windows of a sequence that a model can learn; of each, some labels are ignored, and of some more than of others.
#[derive(Clone)]
pub struct Windows;

impl Batcher<Vec<i64>, TokenItem> for Windows {
    fn batch(&self, windows: Vec<Vec<i64>>, _device: &Device) -> TokenItem {
        let ids = |window: Vec<i64>| window.into_iter().map(|id| id as u32).collect::<Vec<_>>();
        let mut item = TokenItem::from_windows(windows.into_iter().map(ids));
        for label in item.sequences.iter_mut().flat_map(|sequence| &mut sequence.labels) {
            if *label < IGNORED_BELOW {
                *label = IGNORED;
            }
        }
        item
    }
}

/// Labels below it are ignored.
const IGNORED_BELOW: i64 = 4;

/// `count` windows of that many tokens and the one after.
pub fn windows(count: i64, length: i64, seed: i64) -> Vec<Vec<i64>> {
    let id = |sample: i64, i: i64| (sample * sample * 5 + (3 + sample % 2) * i + seed) % 17;
    let window = |sample| (0..=length).map(|i| id(sample, i)).collect();
    (0..count).map(window).collect()
}

/// How many of their labels are not ignored.
pub fn labels(windows: &[Vec<i64>]) -> usize {
    let all = windows.iter().flat_map(|window| &window[1..]);
    all.filter(|id| **id >= IGNORED_BELOW).count()
}
