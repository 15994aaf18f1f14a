//! The memory of a rank's training steps, by the report's definitions.

use burn::tensor::Device;
use burn_sp::comm::Counter;

use serde::{Deserialize, Serialize};

use crate::memory::{Account, resident_peak};

/// Where a rank's bytes are counted.
pub(crate) enum Gauge {
    /// In host memory, every allocation as it comes.
    Host(Account),
    /// In a device's memory pools, looked at when a phase ends, and shared evenly by the ranks on the device.
    Pool {
        /// The device.
        device: Device,
        /// How many ranks are on it.
        ranks: usize,
    },
}

impl Gauge {
    /// Bytes held now.
    fn live(&self) -> usize {
        match self {
            Gauge::Host(account) => account.live(),
            Gauge::Pool { device, ranks } => device
                .memory_pool_usage()
                .map_or(0, |usage| usage.bytes_in_use as usize / ranks),
        }
    }

    /// The most bytes held since the last call, as far as they are known, and from now on anew.
    fn take_peak(&self) -> usize {
        match self {
            Gauge::Host(account) => {
                let peak = account.peak();
                account.reset_peak();
                peak
            }
            Gauge::Pool { .. } => self.live(),
        }
    }
}

/// Follows one rank through its steps; every call ends a phase.
pub(crate) struct Meter {
    gauge: Gauge,
    /// Bytes of all parameters' gradients.
    gradients: usize,
    /// Live when the step started.
    start: usize,
    /// Whether gradients of earlier micro-steps are held.
    accumulated: bool,
    figures: Figures,
}

/// What a rank reports.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Bytes of the rank's parameters, and of their gradients.
    pub parameters: u64,
    /// The most bytes held at once.
    pub peak: u64,
    /// The most bytes that forward and backward held beside parameters, optimizer and gradients.
    pub activation: u64,
    /// What summing the gradients needed beside them.
    pub buckets: u64,
    /// The most that the process had resident, in whatever phase; 0 where the system does not say.
    pub resident: u64,
    /// Traffic of the training steps.
    pub traffic: Vec<Counter>,
}

impl Meter {
    pub fn new(gauge: Gauge, gradients: usize) -> Self {
        gauge.take_peak();
        Self {
            start: gauge.live(),
            gauge,
            gradients,
            accumulated: false,
            figures: Figures {
                parameters: gradients as u64,
                ..Figures::default()
            },
        }
    }

    /// Ends a phase: the most bytes that were held at once in it.
    fn lap(&mut self) -> usize {
        let peak = self.gauge.take_peak();
        self.figures.peak = self.figures.peak.max(peak as u64);
        peak
    }

    /// The optimizer's part is over too.
    pub fn step_done(&mut self) {
        self.lap();
    }

    /// What was held since the last phase is no part of training.
    pub fn skip(&mut self) {
        self.gauge.take_peak();
    }

    pub fn step_starts(&mut self) {
        self.lap();
        self.start = self.gauge.live();
        self.accumulated = false;
    }

    pub fn forward_done(&mut self) {
        self.activation(if self.accumulated { self.gradients } else { 0 });
    }

    /// The gradients grow while the activations shrink. Taking all of them off errs on the low side where the peak comes
    /// early, but never below the end of the forward pass, which has been counted without them.
    pub fn backward_done(&mut self) {
        self.activation(if self.accumulated { 2 } else { 1 } * self.gradients);
        self.accumulated = true;
    }

    fn activation(&mut self, gradients: usize) {
        let held = self.lap().saturating_sub(self.start + gradients);
        self.figures.activation = self.figures.activation.max(held as u64);
    }

    /// Before gradients are summed.
    pub fn sum_starts(&mut self) {
        self.lap();
    }

    pub fn sum_done(&mut self) {
        // The sum takes the gradients it was given apart and makes new ones.
        let extra = self.lap().saturating_sub(self.start + self.gradients);
        self.figures.buckets = self.figures.buckets.max(extra as u64);
    }

    pub fn finish(mut self, traffic: Vec<Counter>) -> Figures {
        self.lap();
        Figures {
            traffic,
            resident: resident_peak().unwrap_or_default(),
            ..self.figures
        }
    }
}
