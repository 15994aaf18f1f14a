use std::cmp::Ordering;

use burn_sp::kernels::philox::Philox;

/// The generator's stream; dropout's are layers and steps, and those of data have the highest bit.
const STREAM: u64 = 1 << 62;

/// How the next token is chosen from its logits.
///
/// Logits are put in order, the largest first, equal ones by token id. Of that order the first `top_k` stay; of their
/// probabilities, `softmax(logits / temperature)` over those that stayed, the shortest run from the start whose sum reaches
/// `top_p` stays (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020), and one of these is drawn in
/// proportion. So of equal logits at the edge of either, those of smaller ids stay, and one token always does.
///
/// The draw is a function of seed and position alone: the same logits at the same position give the same token, on any mesh,
/// whatever came before.
///
/// # Example
/// ```
/// use burn_sp_models::transformer::Sampling;
///
/// let logits = [2.0, 1.0, 2.0, 0.0];
/// assert_eq!(Sampling::greedy().choose(&logits, 0), 0);
/// // Of the two largest, each with probability 1/2.
/// let sampling = Sampling { top_k: Some(2), ..Sampling::with_seed(7) };
/// assert_eq!(sampling.candidates(&logits), [(0, 0.5), (2, 0.5)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; at 0 the largest is chosen, nothing drawn.
    pub temperature: f64,
    /// How many of the most likely tokens stay; all if none is given.
    pub top_k: Option<usize>,
    /// How much probability stays, in `(0, 1]`.
    pub top_p: f64,
    /// Fixes the draws.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always; of equally likely ones, that of the smallest id.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            seed: 0,
        }
    }

    /// By the model's own probabilities.
    pub fn with_seed(seed: u64) -> Self {
        Self {
            temperature: 1.0,
            seed,
            ..Self::greedy()
        }
    }

    /// What cannot work, in one line; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        let Self {
            temperature,
            top_k,
            top_p,
            ..
        } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Some(format!(
                "temperature {temperature}: use 0, for the most likely token, or a number above it"
            ));
        }
        if top_k == Some(0) {
            return Some("top_k 0: one token must be left at least; use 1 or more, or leave it out".into());
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Some(format!(
                "top_p {top_p}: use a number above 0 and up to 1, which leaves all"
            ));
        }
        None
    }

    /// The tokens of which one is drawn, the most likely first, and their probabilities.
    ///
    /// # Panics
    /// If a logit is NaN or the largest infinite.
    pub fn candidates(&self, logits: &[f64]) -> Vec<(u32, f64)> {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        assert!(
            largest.is_finite() && !logits.iter().any(|logit| logit.is_nan()),
            "sampling: of {} logits the largest is {largest}, or one is NaN; the model's weights are broken, or its dtype is \
             too narrow",
            logits.len()
        );
        let of = |id: &u32| logits[*id as usize];
        let order = |a: &u32, b: &u32| of(b).partial_cmp(&of(a)).unwrap_or(Ordering::Equal).then(a.cmp(b));
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let count = match self.temperature {
            0.0 => 1,
            _ => self.top_k.unwrap_or(ids.len()).min(ids.len()),
        };
        if count < ids.len() {
            ids.select_nth_unstable_by(count - 1, order);
            ids.truncate(count);
        }
        ids.sort_unstable_by(order);
        if count == 1 {
            return vec![(ids[0], 1.0)];
        }
        let weight = |id: &u32| ((of(id) - largest) / self.temperature).exp();
        let weights: Vec<f64> = ids.iter().map(weight).collect();
        let enough = self.top_p * weights.iter().sum::<f64>();
        let (mut kept, mut sum) = (0, 0.0);
        while kept < weights.len() && (kept == 0 || self.top_p == 1.0 || sum < enough) {
            sum += weights[kept];
            kept += 1;
        }
        let probabilities = weights[..kept].iter().map(|weight| weight / sum);
        ids.into_iter().zip(probabilities).collect()
    }

    /// The token at a position.
    ///
    /// # Panics
    /// As [`candidates`](Self::candidates).
    pub fn choose(&self, logits: &[f64], position: usize) -> u32 {
        let candidates = self.candidates(logits);
        let words = Philox::new(self.seed, STREAM);
        let [high, low] = [0, 1].map(|word| u64::from(words.word(2 * position as u64 + word)));
        // 53 bits, as many as the fraction of an f64 has.
        let drawn = ((high << 32 | low) >> 11) as f64 / (1u64 << 53) as f64;
        let mut sum = 0.0;
        let below = candidates.iter().find(|(_, probability)| {
            sum += probability;
            drawn < sum
        });
        // A sum of all may be rounded to less than 1.
        below.or(candidates.last()).expect("there are candidates").0
    }
}
