use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry, SerializedEntry,
    format_float,
};

use super::TokenOutput;

/// A metric whose value for an epoch is that of all its tokens, each counted once: a step with twice the tokens weighs
/// twice. (Burn's `LossMetric` takes the mean of the steps.)
#[derive(Clone, Debug)]
pub struct TokenMetric {
    kind: Kind,
    name: MetricName,
    /// Of the last step, and how many tokens it had.
    step: (f64, u64),
    /// Of the epoch.
    sum: f64,
    tokens: u64,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Loss,
    Perplexity,
    Accuracy,
}

impl TokenMetric {
    /// Mean loss of a token. It has the name of Burn's `LossMetric`, "Loss", by which checkpointing strategies and early
    /// stopping find it.
    pub fn loss() -> Self {
        Self::new(Kind::Loss, "Loss")
    }

    /// `exp` of the mean loss of a token, which must be a cross entropy in nats.
    pub fn perplexity() -> Self {
        Self::new(Kind::Perplexity, "Perplexity")
    }

    /// How many of the tokens are predicted, in percent, where the [`TokenOutput`] says it.
    pub fn accuracy() -> Self {
        Self::new(Kind::Accuracy, "Accuracy")
    }

    fn new(kind: Kind, name: &str) -> Self {
        Self {
            kind,
            name: Arc::new(name.to_owned()),
            step: (f64::NAN, 0),
            sum: 0.0,
            tokens: 0,
        }
    }

    fn unit(&self) -> Option<&'static str> {
        match self.kind {
            Kind::Accuracy => Some("%"),
            Kind::Loss | Kind::Perplexity => None,
        }
    }

    /// What is shown of a mean over tokens.
    fn shown(&self, mean: f64) -> f64 {
        match self.kind {
            Kind::Loss => mean,
            Kind::Perplexity => mean.exp(),
            Kind::Accuracy => 100.0 * mean,
        }
    }

    fn epoch(&self) -> f64 {
        self.shown(self.sum / self.tokens as f64)
    }

    fn of_step(&self) -> NumericEntry {
        let (mean, tokens) = self.step;
        entry(self.shown(mean), tokens)
    }

    fn serialized(&self, entry: &NumericEntry) -> SerializedEntry {
        let [epoch, step] = [self.epoch(), self.shown(self.step.0)].map(|value| format_float(value, 3));
        let unit = self.unit().map_or(String::new(), |unit| format!(" {unit}"));
        SerializedEntry::new(format!("epoch {epoch}{unit} - batch {step}{unit}"), entry.serialize())
    }
}

fn entry(value: f64, tokens: u64) -> NumericEntry {
    NumericEntry::Aggregated {
        aggregated_value: value,
        count: tokens as usize,
    }
}

impl Metric for TokenMetric {
    type Input = TokenOutput;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: self.unit().map(str::to_owned),
            higher_is_better: matches!(self.kind, Kind::Accuracy),
        }
        .into()
    }

    fn update(&mut self, item: &TokenOutput, _metadata: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        let sum = match self.kind {
            Kind::Loss | Kind::Perplexity => Some(item.loss * item.tokens as f64),
            Kind::Accuracy => item.correct.map(|correct| correct as f64),
        };
        // A step without tokens has no mean.
        let Some(sum) = sum.filter(|_| item.tokens > 0) else {
            self.step = (f64::NAN, 0);
            return Ok(SerializedEntry::not_available(self.unit()));
        };
        self.step = (sum / item.tokens as f64, item.tokens);
        self.sum += sum;
        self.tokens += item.tokens;
        Ok(self.serialized(&self.of_step()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        if self.tokens == 0 {
            return Ok(SerializedEntry::not_available(self.unit()));
        }
        Ok(self.serialized(&self.final_value()))
    }

    fn clear(&mut self) {
        *self = Self::new(self.kind, &self.name);
    }
}

impl Numeric for TokenMetric {
    fn value(&self) -> Option<NumericEntry> {
        (self.step.1 > 0).then(|| self.of_step())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        (self.tokens > 0).then(|| entry(self.epoch(), self.tokens))
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Final(self.epoch())
    }
}
