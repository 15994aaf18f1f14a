use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// Levels of the training table.
const LEVELS: usize = 1000;

/// The noise levels of flow matching: at level `s` a latent is `(1 - s)` of the clean one and `s` of noise, from 1 (noise
/// alone) to 0. A model is told the time `1000 s`.
///
/// Training draws from a table of 1000 levels, warped by a shift so that more of them are near noise: `shift * s / (1 +
/// (shift - 1) s)` (Esser et al., "Scaling Rectified Flow Transformers", arXiv 2403.03206). Losses are weighted by
/// `exp(-2 ((t - 500) / 1000)^2)` less its minimum, 1 in the mean over the table.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowSchedule {
    shift: f64,
    weights: Vec<f64>,
}

impl FlowSchedule {
    /// With a shift; 1 warps nothing, Wan has 5.
    ///
    /// # Panics
    /// If the shift is not above 0.
    pub fn new(shift: f64) -> Self {
        assert!(
            shift.is_finite() && shift > 0.0,
            "flow schedule: a shift of {shift}; use one above 0, such as 5"
        );
        let mut schedule = Self {
            shift,
            weights: Vec::new(),
        };
        let bell = |index| f64::exp(-2.0 * ((schedule.time(index) - 500.0) / 1000.0).powi(2));
        let bells: Vec<f64> = (0..LEVELS).map(bell).collect();
        let least = bells.iter().copied().fold(f64::INFINITY, f64::min);
        let mean = bells.iter().map(|bell| bell - least).sum::<f64>() / LEVELS as f64;
        schedule.weights = bells.iter().map(|bell| (bell - least) / mean).collect();
        schedule
    }

    /// How many levels training draws from.
    pub fn levels(&self) -> usize {
        LEVELS
    }

    /// A level of the table, from 1 on down, in `[0, 1]`.
    pub fn level(&self, index: usize) -> f64 {
        self.warped(1.0 - index as f64 / LEVELS as f64)
    }

    /// The time of a level of the table, in `[0, 1000]`: what the model is told.
    pub fn time(&self, index: usize) -> f64 {
        time_of(self.level(index))
    }

    /// The weight of the loss at a level of the table.
    ///
    /// # Panics
    /// If there is no such level.
    pub fn weight(&self, index: usize) -> f64 {
        self.weights[index]
    }

    /// The levels of a sampler's steps: where it starts, 1, and where each step leads, the last to 0.
    pub fn steps(&self, steps: usize) -> Vec<f64> {
        let even = |step: usize| 1.0 - step as f64 / steps.max(1) as f64;
        (0..=steps).map(|step| self.warped(even(step))).collect()
    }

    fn warped(&self, level: f64) -> f64 {
        self.shift * level / (1.0 + (self.shift - 1.0) * level)
    }
}

/// The time of a noise level.
pub(super) fn time_of(level: f64) -> f64 {
    1000.0 * level
}

/// How a sampler goes from level to level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Solver {
    /// Straight on: of first order.
    Euler,
    /// UniPC (Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models", arXiv
    /// 2302.04867) of second order, in its form of B(h) = e^h - 1 that predicts clean latents: as many evaluations of the
    /// model, and fewer steps for the same result.
    #[default]
    UniPc,
}

/// Takes latents from noise to clean, step by step.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_sp_models::video_dit::{FlowSchedule, FlowSolver, Solver};
///
/// let noise = Tensor::<1>::from_floats([4.0], &Device::flex());
/// let clean = Tensor::<1>::from_floats([1.0], &Device::flex());
/// // Straight down the line from noise to the clean latent, whose velocity is the same everywhere.
/// let mut solver = FlowSolver::new(Solver::Euler, FlowSchedule::new(1.0).steps(4));
/// let mut x = noise.clone();
/// while solver.level().is_some() {
///     x = solver.step(x, noise.clone() - clean.clone());
/// }
/// assert_eq!(x.into_scalar::<f32>(), 1.0);
/// ```
#[derive(Clone, Debug)]
pub struct FlowSolver<const D: usize> {
    solver: Solver,
    levels: Vec<f64>,
    step: usize,
    /// Where the last step started, and with which predictor's order it was taken.
    last: Option<(Tensor<D>, usize)>,
    /// The clean latents predicted at the last steps, the latest first.
    clean: Vec<Tensor<D>>,
}

impl<const D: usize> FlowSolver<D> {
    /// From the first to the last of descending levels in [0, 1].
    ///
    /// # Panics
    /// If there are fewer than two levels, or they do not descend.
    pub fn new(solver: Solver, levels: Vec<f64>) -> Self {
        let descend = levels.len() > 1 && levels.windows(2).all(|pair| pair[0] > pair[1]);
        assert!(
            descend && levels[0] <= 1.0 && levels[levels.len() - 1] >= 0.0,
            "flow solver: levels {levels:?}; give two at least, descending from 1 to 0"
        );
        Self {
            solver,
            levels,
            step: 0,
            last: None,
            clean: Vec::new(),
        }
    }

    /// The level that the latents are at; none after the last step.
    pub fn level(&self) -> Option<f64> {
        (self.step + 1 < self.levels.len()).then(|| self.levels[self.step])
    }

    /// The latents one level on, from those at [`level`](Self::level) and their velocity.
    ///
    /// # Shapes
    /// - `x`, `velocity`: any, both the same, and so is the result
    ///
    /// # Panics
    /// After the last step.
    #[track_caller]
    pub fn step(&mut self, x: Tensor<D>, velocity: Tensor<D>) -> Tensor<D> {
        let Some(level) = self.level() else {
            panic!("flow solver: there are {} steps, and all are taken", self.step);
        };
        let next = self.levels[self.step + 1];
        if self.solver == Solver::Euler {
            self.step += 1;
            return x + velocity * (next - level);
        }
        let clean = x.clone() - velocity * level;
        let x = match self.last.take() {
            // The last step again, now that the latents it led to have been seen.
            Some((from, order)) => self.unipc(from, self.step - 1, order, Some(&clean)),
            None => x,
        };
        self.clean.insert(0, clean);
        self.clean.truncate(2);
        let left = self.levels.len() - 1 - self.step;
        let order = self.clean.len().min(left);
        let y = self.unipc(x.clone(), self.step, order, None);
        self.last = Some((x, order));
        self.step += 1;
        y
    }

    /// From a step's level to the next, by the clean latents predicted at the step (and at the one before, for order 2),
    /// corrected by those predicted after it if they are known.
    fn unipc(&self, x: Tensor<D>, step: usize, order: usize, after: Option<&Tensor<D>>) -> Tensor<D> {
        let [from, to] = [self.levels[step], self.levels[step + 1]];
        let at = |level: f64| f64::ln(1.0 - level) - f64::ln(level);
        let h = at(to) - at(from);
        // Called h phi_1 in the paper, of -h, and its B(h) too.
        let phi = f64::exp_m1(-h);
        let now = self.clean[0].clone();
        let straight = x * (to / from) - now.clone() * ((1.0 - to) * phi);
        // The right sides of the paper's conditions of first and second order.
        let first = (phi / -h - 1.0) / phi;
        let second = ((phi / -h - 1.0) / -h - 0.5) * 2.0 / phi;
        let before = (order > 1).then(|| {
            let ratio = (at(self.levels[step - 1]) - at(from)) / h;
            (ratio, (self.clean[1].clone() - now.clone()) * ratio.recip())
        });
        let slope = match (before, after) {
            (None, None) => return straight,
            (Some((_, slope)), None) => slope * 0.5,
            (None, Some(after)) => (after.clone() - now) * 0.5,
            (Some((ratio, slope)), Some(after)) => {
                let past = (first - second) / (1.0 - ratio);
                slope * past + (after.clone() - now) * (first - past)
            }
        };
        straight - slope * ((1.0 - to) * phi)
    }
}
