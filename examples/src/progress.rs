//! What a person sees while ranks work: a bar on a terminal, plain lines elsewhere, all on stderr.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::report::Step;

/// Plain lines come no faster than this.
const PAUSE: Duration = Duration::from_secs(1);

/// Shows how a run goes on; only rank 0 should tell it.
#[derive(Debug)]
pub struct Progress {
    kind: Kind,
    /// Whether lines about the run are shown.
    lines: bool,
}

#[derive(Debug)]
enum Kind {
    Quiet,
    Bar(ProgressBar),
    Lines {
        start: Instant,
        /// Steps of earlier runs.
        before: AtomicUsize,
        last: std::sync::Mutex<Option<Instant>>,
        steps: usize,
    },
}

impl Progress {
    /// A bar or lines for so many steps.
    pub fn new(steps: usize) -> Self {
        let kind = if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{bar:30.cyan} step {pos}/{len}  {msg}  {eta} left");
            let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
            Kind::Bar(match style {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            })
        } else {
            Kind::Lines {
                start: Instant::now(),
                before: Default::default(),
                last: Default::default(),
                steps,
            }
        };
        Self { kind, lines: true }
    }

    /// Shows nothing.
    pub fn quiet() -> Self {
        Self {
            kind: Kind::Quiet,
            lines: false,
        }
    }

    /// From now on steps only, and no lines about the run.
    pub fn steps_only(self) -> Self {
        Self { lines: false, ..self }
    }

    /// A line about the run, before its steps.
    pub fn line(&self, line: &str) {
        // The bar is drawn at the first step, so lines about the run come before it.
        if self.lines {
            eprintln!("{line}");
        }
    }

    /// So many steps were done by an earlier run.
    pub fn resume(&self, steps: usize) {
        match &self.kind {
            Kind::Quiet => {}
            Kind::Bar(bar) => {
                bar.set_position(steps as u64);
                bar.reset_eta();
            }
            Kind::Lines { before, .. } => before.store(steps, Ordering::Relaxed),
        }
    }

    /// A step is done.
    pub fn step(&self, step: &Step) {
        let rate = step.tokens as f64 / step.seconds;
        let loss = step.loss;
        match &self.kind {
            Kind::Quiet => {}
            Kind::Bar(bar) => {
                bar.set_message(format!("loss {loss:.4}  {rate:.0} tokens/s"));
                bar.set_position(step.step as u64);
            }
            Kind::Lines {
                start,
                before,
                last,
                steps,
            } => {
                let before = before.load(Ordering::Relaxed);
                let mut last = last.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                let edge = step.step == before + 1 || step.step == *steps;
                if !edge && last.is_some_and(|last| last.elapsed() < PAUSE) {
                    return;
                }
                *last = Some(Instant::now());
                let left = start
                    .elapsed()
                    .div_f64((step.step - before) as f64)
                    .mul_f64((*steps - step.step) as f64);
                eprintln!(
                    "step {}/{steps}  loss {loss:.4}  gradient norm {:.3}  {rate:.0} tokens/s  {} left",
                    step.step,
                    step.grad_norm,
                    HumanDuration(left),
                );
            }
        }
    }

    /// All steps are done; the bar stays.
    pub fn finish(&self) {
        if let Kind::Bar(bar) = &self.kind {
            bar.finish();
            // It leaves the cursor in its line.
            eprintln!();
        }
    }
}
