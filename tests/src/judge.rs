use std::collections::BTreeMap;

use burn::tensor::DType;
use burn_sp::layout::MeshShape;

use crate::outcome::add;
use crate::run::{Part, Run};
use crate::{Deviation, Entry, Quantity, Values};

/// The runs on one rank, and the rule.
pub(crate) struct Judge<'a> {
    pub mesh: MeshShape,
    dtype: DType,
    factor: f64,
    first: &'a Run,
    truth: BTreeMap<Quantity, Part<'a>>,
    single: BTreeMap<Quantity, Part<'a>>,
}

impl<'a> Judge<'a> {
    pub fn new(mesh: MeshShape, dtype: DType, factor: f64, truth: &'a Run, single: &'a Run) -> Self {
        Self {
            mesh,
            dtype,
            factor,
            first: single,
            truth: truth.quantities(&truth.inputs),
            single: single.quantities(&single.inputs),
        }
    }

    /// What the ranks have, each quantity by its worst rank; or everything that differs, in the order of a step, of each quantity
    /// the values before what only differs between ranks.
    pub fn ranks(&self, ranks: &[Run]) -> Result<Vec<Entry>, Vec<Deviation>> {
        // Every rank has a term of an input's gradient, if only that of 0: what counts is their sum.
        let mut inputs: BTreeMap<String, Values> = BTreeMap::new();
        for (name, term) in ranks.iter().flat_map(|run| &run.inputs) {
            match inputs.get_mut(name) {
                Some(sum) => add(sum, term),
                None => drop(inputs.insert(name.clone(), term.clone())),
            }
        }
        let mut entries: BTreeMap<Quantity, Entry> = BTreeMap::new();
        let mut deviations = Vec::new();
        for (rank, run) in ranks.iter().enumerate() {
            for result in self.rank(rank, &run.quantities(&inputs)) {
                let entry = match result {
                    Ok(entry) => entry,
                    Err(deviation) => {
                        deviations.push(deviation);
                        continue;
                    }
                };
                let worst = entries.entry(entry.quantity.clone()).or_insert_with(|| entry.clone());
                if entry.error > worst.error {
                    *worst = entry;
                }
            }
        }
        deviations.extend(self.unequal(ranks));
        if deviations.is_empty() {
            return Ok(entries.into_values().collect());
        }
        // Stable: by rank within a quantity.
        deviations.sort_by_key(|deviation| deviation.quantity().map(|quantity| self.first.order(quantity)));
        Err(deviations)
    }

    /// What every rank should hold bit for bit, and does not.
    fn unequal(&self, ranks: &[Run]) -> Vec<Deviation> {
        let mut deviations = Vec::new();
        for (rank, run) in ranks.iter().enumerate() {
            let mut push = |quantity| {
                deviations.push(Deviation::Ranks {
                    mesh: self.mesh,
                    rank,
                    quantity,
                });
            };
            if run.loss.to_bits() != ranks[0].loss.to_bits() {
                push(Quantity::Loss);
            }
            let by_path = [
                (
                    &run.gradients,
                    &ranks[0].gradients,
                    Quantity::Gradient as fn(String) -> Quantity,
                ),
                (&run.parameters, &ranks[0].parameters, Quantity::Parameter),
            ];
            for (all, of_first, quantity) in by_path {
                for (path, values) in all {
                    // One that rank 0 lacks is reported by itself.
                    if of_first.get(path).is_some_and(|first| !first.same_bits(values)) {
                        push(quantity(path.clone()));
                    }
                }
            }
        }
        deviations
    }

    fn rank(&self, rank: usize, found: &BTreeMap<Quantity, Part<'_>>) -> Vec<Result<Entry, Deviation>> {
        let mesh = self.mesh;
        let lone = |quantity: &Quantity, expected| {
            Err(Deviation::Presence {
                mesh,
                rank,
                quantity: quantity.clone(),
                expected,
            })
        };
        let missing = self.single.keys().filter(|quantity| !found.contains_key(quantity));
        let missing = missing.map(|quantity| lone(quantity, true));
        let compared = found.iter().map(|(quantity, part)| {
            if self.single.contains_key(quantity) {
                self.quantity(rank, quantity, part)
            } else {
                lone(quantity, false)
            }
        });
        missing.chain(compared).collect()
    }

    /// The largest element of a quantity in f64. A gradient that is truly 0, as that of a key's bias is, is what remains
    /// of terms as large as other gradients: their size is its scale.
    fn scale(&self, quantity: &Quantity) -> f64 {
        let peak = |part: &Part<'_>| part.elements.iter().fold(0.0f64, |peak, x| x.abs().max(peak));
        let own = peak(&self.truth[quantity]);
        if !matches!(quantity, Quantity::Gradient(_)) {
            return own;
        }
        let gradients = self
            .truth
            .iter()
            .filter(|(other, _)| matches!(other, Quantity::Gradient(_)));
        let largest = gradients.map(|(_, part)| peak(part)).fold(0.0, f64::max);
        if own < 1e-12 * largest { largest } else { own }
    }

    fn quantity(&self, rank: usize, quantity: &Quantity, part: &Part<'_>) -> Result<Entry, Deviation> {
        let mesh = self.mesh;
        let (truth, single) = (&self.truth[quantity], &self.single[quantity]);
        if part.kind() != single.kind() {
            return Err(Deviation::Kind {
                mesh,
                rank,
                quantity: quantity.clone(),
                found: part.kind(),
                expected: single.kind(),
            });
        }
        let off = |at: usize| (part.elements[at] - truth.elements[part.index(at)]).abs();
        let off_alone = |index: usize| (single.elements[index] - truth.elements[index]).abs();
        let rms = |count: usize, off: &dyn Fn(usize) -> f64| {
            let squares: f64 = (0..count).map(|at| off(at).powi(2)).sum();
            (squares / count.max(1) as f64).sqrt()
        };
        let count = part.elements.len();
        // One rank's error on the same elements too: a few tokens may be worse conditioned than the rest.
        let single_error = rms(single.elements.len(), &off_alone).max(rms(count, &|at| off_alone(part.index(at))));
        let peak = self.scale(quantity);
        // Losses are read as f64 sums of shares in the run's dtype, at least f32.
        let rounding = epsilon(part.dtype.unwrap_or(if self.dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        }));
        // Rounding errors are like random draws: the ratio of two root mean squares over n of them scatters by 1/sqrt(n).
        let chance = 1.0 + 3.0 / (count.max(1) as f64).sqrt();
        let entry = Entry {
            quantity: quantity.clone(),
            error: rms(count, &off),
            single: single_error,
            allowed: self.factor * chance * single_error.max(rounding * peak),
        };
        // Written so that NaN fails.
        if entry.error <= entry.allowed {
            return Ok(entry);
        }
        let worst = (0..count).max_by(|a, b| off(*a).total_cmp(&off(*b))).unwrap_or(0);
        let mut rest = part.index(worst);
        let mut index: Vec<usize> = part.shape.iter().rev().map(|len| (rest % len, rest /= len).0).collect();
        index.reverse();
        Err(Deviation::Value {
            mesh,
            rank,
            entry: Box::new(entry),
            index,
            found: part.elements[worst],
            expected: truth.elements[part.index(worst)],
        })
    }
}

/// The distance from 1 to the next larger number.
pub(crate) fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F16 => f64::from(half::f16::EPSILON),
        DType::BF16 => f64::from(half::bf16::EPSILON),
        _ => f64::from(f32::EPSILON),
    }
}
