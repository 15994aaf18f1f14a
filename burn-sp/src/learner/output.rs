use burn::tensor::{Device, ExecutionError, Int, Tensor};
use burn::train::ItemLazy;
use burn::train::metric::{Adaptor, LossInput};

use crate::train::{LossShare, valid_tokens};
use crate::{SpTensor, tensor::Refusal};

/// What a step over tokens tells metrics, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenOutput {
    /// Mean over the tokens of all ranks.
    pub loss: f64,
    /// How many there are, without those whose label is ignored.
    pub tokens: u64,
    /// How many of them were predicted, if that was counted.
    pub correct: Option<u64>,
}

impl TokenOutput {
    /// Of a loss that is a mean over so many tokens of all ranks. Collective.
    #[track_caller]
    pub fn new(loss: &LossShare, tokens: u64) -> Self {
        Self {
            loss: loss.value(),
            tokens,
            correct: None,
        }
    }

    /// Also counts how many labels have the largest logit. Collective.
    ///
    /// # Shapes
    /// - `logits`: `[batch, tokens, classes]`
    /// - `labels`: `[batch, tokens]`; negative ones are ignored
    ///
    /// # Panics
    /// If classes are sharded, or tokens otherwise than their labels.
    #[track_caller]
    pub fn with_correct(self, logits: &SpTensor<3>, labels: &SpTensor<2, Int>) -> Self {
        let (of_logits, of_labels) = (logits.layout(), labels.layout());
        let alike = (0..2).all(|dim| of_logits.shards(dim) == of_labels.shards(dim));
        if !alike || !of_logits.shards(2).is_empty() {
            Refusal::new(
                "TokenOutput::with_correct",
                format!("logits are {of_logits}, labels {of_labels}"),
                "shard both over the same tokens, and redistribute the classes to Replicate",
            )
            .refuse();
        }
        logits.refuse_partial("TokenOutput::with_correct");
        let predicted = logits.local().clone().argmax(2).squeeze_dim::<2>(2);
        let predicted = labels.clone().tokenwise(|labels| {
            let wrong = labels.clone().not_equal(predicted);
            labels.mask_fill(wrong, -1)
        });
        let correct = Some(valid_tokens([&predicted]));
        Self { correct, ..self }
    }
}

impl ItemLazy for TokenOutput {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<TokenOutput> for TokenOutput {
    fn adapt(&self) -> TokenOutput {
        *self
    }
}

/// One value a step: Burn's `LossMetric` weights steps alike, however many tokens they have;
/// [`TokenMetric::loss`](super::TokenMetric::loss) does not.
impl Adaptor<LossInput> for TokenOutput {
    fn adapt(&self) -> LossInput {
        LossInput::new(Tensor::from_data([self.loss], &host()))
    }
}

/// Where a number costs nothing.
fn host() -> Device {
    #[cfg(feature = "flex")]
    let device = Device::flex();
    #[cfg(not(feature = "flex"))]
    let device = Device::default();
    device
}
