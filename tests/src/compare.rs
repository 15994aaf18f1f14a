use std::collections::BTreeMap;
use std::time::Duration;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, TensorData};
use burn_sp::layout::MeshShape;
use burn_sp::train::{ParamLayouts, sum_gradients};
use burn_sp::{LaunchConfig, SpDevice, launch_module};

use crate::outcome::{Piece, add};
use crate::{
    Difference, Entry, Outcome, Quantity, Rank, Report, Values, cast, dtype_of, gather_gradients, gradients_by_path,
};

/// Takes a rank's part of a whole module, and says which parameters are sharded.
type Shard<M> = Box<dyn Fn(M, &SpDevice) -> (M, ParamLayouts) + Send + Sync>;

/// Runs a closure on simulated ranks and compares it with itself on one rank: outputs, loss, and the gradient of every
/// parameter and input.
///
/// The tolerance is never a guess. The closure also runs on one rank in f64; how far one rank in the model's own dtype is
/// from that is the error that the dtype costs, and a sharded run may be off by [`FACTOR`](Self::FACTOR) times as much.
/// Errors are root mean squares over a tensor. Two allowances are made for chance: a tensor of n elements may have
/// `1 + 3 / sqrt(n)` times that, and one rank's error counts as at least one rounding of the largest element (of all
/// gradients, for a gradient that is truly 0).
///
/// See the crate's documentation for an example.
pub struct Comparison<M> {
    module: M,
    shard: Shard<M>,
    device: Device,
    inputs: BTreeMap<String, TensorData>,
    meshes: Vec<MeshShape>,
    timeout: Duration,
    factor: f64,
}

impl<M: Module> Comparison<M> {
    /// By default, a sharded run's error may be this many times one rank's.
    pub const FACTOR: f64 = 1.5;

    /// Compares this module, whose dtype is that of its first parameter (f32 if it has none), on Flex, on 2 and 4 ranks of the ulysses axis.
    /// All parameters are taken as replicated; see [`shard_by`](Self::shard_by).
    pub fn new(module: M) -> Self {
        Self {
            module,
            shard: Box::new(|module, _| (module, ParamLayouts::replicated())),
            device: Device::flex().autodiff(),
            inputs: BTreeMap::new(),
            meshes: vec![MeshShape::ulysses(2), MeshShape::ulysses(4)],
            timeout: Duration::from_secs(30),
            factor: Self::FACTOR,
        }
    }

    /// On this device; its autodiff setting is kept. What it is compared with in f64 always runs on Flex: few
    /// GPUs have all functions in f64.
    pub fn on_device(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// On these meshes.
    pub fn on(self, meshes: impl Into<Vec<MeshShape>>) -> Self {
        Self {
            meshes: meshes.into(),
            ..self
        }
    }

    /// Gives the closure a float tensor under a name; see [`Rank::input`].
    pub fn input(mut self, name: impl Into<String>, data: TensorData) -> Self {
        self.inputs.insert(name.into(), data);
        self
    }

    /// Before the closure runs, each rank takes its part of the module so; gradients of sharded parameters are gathered
    /// by their layouts before they are compared.
    pub fn shard_by(self, shard: impl Fn(M, &SpDevice) -> (M, ParamLayouts) + Send + Sync + 'static) -> Self {
        Self {
            shard: Box::new(shard),
            ..self
        }
    }

    /// How long a rank may wait for its peers.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Another factor than [`FACTOR`](Self::FACTOR).
    pub fn with_factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Runs the closure everywhere and compares.
    ///
    /// # Errors
    /// The first difference: which mesh, rank, output or parameter, by how much, and where.
    pub fn run<F>(&self, body: F) -> Result<Report, Difference>
    where
        F: Fn(&Rank, &M) -> Outcome + Send + Sync,
    {
        let dtype = dtype_of(&self.module).unwrap_or(DType::F32);
        let one = MeshShape::default();
        let truth = self
            .launch(&Device::flex().autodiff(), one, DType::F64, &body)?
            .remove(0);
        let single = self.launch(&self.device, one, dtype, &body)?.remove(0);
        let meshes = self.meshes.iter().map(|mesh| {
            let ranks = self.launch(&self.device, *mesh, dtype, &body)?;
            Ok((*mesh, self.judge(*mesh, dtype, &truth, &single, ranks)?))
        });
        Ok(Report {
            meshes: meshes.collect::<Result<_, _>>()?,
        })
    }

    fn launch<F>(&self, device: &Device, mesh: MeshShape, dtype: DType, body: &F) -> Result<Vec<Run>, Difference>
    where
        F: Fn(&Rank, &M) -> Outcome + Send + Sync,
    {
        let config = LaunchConfig::new(mesh).with_timeout(self.timeout);
        let module = cast(self.module.clone(), dtype).train();
        let (inputs, shard) = (&self.inputs, &self.shard);
        launch_module(&config, device, module, |device, module| {
            let (module, layouts) = shard(module, &device);
            let rank = Rank::new(device, dtype, inputs.clone());
            let outcome = body(&rank, &module);
            let loss = outcome.loss.value();
            let mut grads = outcome.loss.backward();
            let inputs = rank.input_gradients(&grads);
            let own = GradientsParams::from_module(&mut grads, &module);
            let summed = sum_gradients(&module, own, &layouts, rank.device().mesh());
            let whole = gather_gradients(&module, summed, &layouts, rank.device());
            Run {
                loss,
                outputs: outcome.outputs,
                inputs,
                gradients: gradients_by_path(&module, &whole),
            }
        })
        .map_err(|error| Difference::Failed { mesh, error })
    }

    fn judge(
        &self,
        mesh: MeshShape,
        dtype: DType,
        truth: &Run,
        single: &Run,
        ranks: Vec<Run>,
    ) -> Result<Vec<Entry>, Difference> {
        for (rank, run) in ranks.iter().enumerate() {
            if run.loss.to_bits() != ranks[0].loss.to_bits() {
                let quantity = Quantity::Loss;
                return Err(Difference::Ranks { mesh, rank, quantity });
            }
            for (path, gradient) in &run.gradients {
                // One that rank 0 lacks is reported below.
                if ranks[0]
                    .gradients
                    .get(path)
                    .is_some_and(|first| !first.same_bits(gradient))
                {
                    let quantity = Quantity::Gradient(path.clone());
                    return Err(Difference::Ranks { mesh, rank, quantity });
                }
            }
        }
        let judge = Judge {
            mesh,
            dtype,
            factor: self.factor,
            truth: truth.quantities(),
            single: single.quantities(),
        };
        // Every rank has a term of an input's gradient, if only that of 0: what counts is their sum.
        let mut inputs: BTreeMap<String, Values> = BTreeMap::new();
        for (name, term) in ranks.iter().flat_map(|run| &run.inputs) {
            match inputs.get_mut(name) {
                Some(sum) => add(sum, term),
                None => drop(inputs.insert(name.clone(), term.clone())),
            }
        }
        let mut entries: BTreeMap<Quantity, Entry> = BTreeMap::new();
        for (rank, mut run) in ranks.into_iter().enumerate() {
            run.inputs = inputs.clone();
            for entry in judge.rank(rank, &run.quantities())? {
                let worst = entries.entry(entry.quantity.clone()).or_insert_with(|| entry.clone());
                if entry.error > worst.error {
                    *worst = entry;
                }
            }
        }
        Ok(entries.into_values().collect())
    }
}

/// What one rank ended with.
#[derive(Clone)]
struct Run {
    loss: f64,
    outputs: Vec<Piece>,
    inputs: BTreeMap<String, Values>,
    gradients: BTreeMap<String, Values>,
}

/// Some elements of a whole tensor: all of them if there are no indices.
#[derive(Clone)]
struct Part {
    shape: Vec<usize>,
    dtype: Option<DType>,
    elements: Vec<f64>,
    indices: Option<Vec<usize>>,
}

impl Part {
    fn whole(values: &Values) -> Self {
        Self {
            shape: values.shape.clone(),
            dtype: Some(values.dtype),
            elements: values.elements.clone(),
            indices: None,
        }
    }

    fn kind(&self) -> String {
        match self.dtype {
            Some(dtype) => format!("{:?} of {}", self.shape, dtype.name()),
            None => format!("{:?}", self.shape),
        }
    }

    fn index(&self, local: usize) -> usize {
        self.indices.as_ref().map_or(local, |indices| indices[local])
    }
}

impl Run {
    fn quantities(&self) -> BTreeMap<Quantity, Part> {
        let loss = Part {
            shape: vec![],
            dtype: None,
            elements: vec![self.loss],
            indices: None,
        };
        let outputs = self.outputs.iter().map(|piece| {
            let part = Part {
                shape: piece.shape.clone(),
                dtype: Some(piece.local.dtype),
                elements: piece.local.elements.clone(),
                indices: Some(piece.global_indices()),
            };
            (Quantity::Output(piece.name.clone()), part)
        });
        let inputs = &self.inputs;
        let inputs = inputs
            .iter()
            .map(|(name, sum)| (Quantity::InputGradient(name.clone()), Part::whole(sum)));
        let gradients = &self.gradients;
        let gradients = gradients
            .iter()
            .map(|(path, grad)| (Quantity::Gradient(path.clone()), Part::whole(grad)));
        std::iter::once((Quantity::Loss, loss))
            .chain(outputs)
            .chain(inputs)
            .chain(gradients)
            .collect()
    }
}

/// The runs on one rank, and the rule.
struct Judge {
    mesh: MeshShape,
    dtype: DType,
    factor: f64,
    truth: BTreeMap<Quantity, Part>,
    single: BTreeMap<Quantity, Part>,
}

impl Judge {
    fn rank(&self, rank: usize, found: &BTreeMap<Quantity, Part>) -> Result<Vec<Entry>, Difference> {
        let mesh = self.mesh;
        for (quantity, expected) in [(&self.single, true), (found, false)]
            .into_iter()
            .flat_map(|(all, expected)| all.keys().map(move |quantity| (quantity, expected)))
        {
            if found.contains_key(quantity) != self.single.contains_key(quantity) {
                let quantity = quantity.clone();
                return Err(Difference::Presence {
                    mesh,
                    rank,
                    quantity,
                    expected,
                });
            }
        }
        found
            .iter()
            .map(|(quantity, part)| self.quantity(rank, quantity, part))
            .collect()
    }

    /// The largest element of a quantity in f64. A gradient that is truly 0, as that of a key's bias is, is what remains
    /// of terms as large as other gradients: their size is its scale.
    fn scale(&self, quantity: &Quantity) -> f64 {
        let peak = |part: &Part| part.elements.iter().fold(0.0f64, |peak, x| x.abs().max(peak));
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

    fn quantity(&self, rank: usize, quantity: &Quantity, part: &Part) -> Result<Entry, Difference> {
        let mesh = self.mesh;
        let (truth, single) = (&self.truth[quantity], &self.single[quantity]);
        if part.kind() != single.kind() {
            return Err(Difference::Kind {
                mesh,
                rank,
                quantity: quantity.clone(),
                found: part.kind(),
                expected: single.kind(),
            });
        }
        let off = |part: &Part, at: usize| (part.elements[at] - truth.elements[part.index(at)]).abs();
        let rms = |part: &Part| {
            let squares: f64 = (0..part.elements.len()).map(|at| off(part, at).powi(2)).sum();
            (squares / part.elements.len().max(1) as f64).sqrt()
        };
        // One rank's error on the same elements too: a few tokens may be worse conditioned than the rest.
        let same = Part {
            elements: (0..part.elements.len())
                .map(|at| single.elements[part.index(at)])
                .collect(),
            ..part.clone()
        };
        let single_error = rms(single).max(rms(&same));
        let peak = self.scale(quantity);
        // Losses are read as f64 sums of shares in the run's dtype, at least f32.
        let rounding = epsilon(part.dtype.unwrap_or(if self.dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        }));
        // Rounding errors are like random draws: the ratio of two root mean squares over n of them scatters by 1/sqrt(n).
        let chance = 1.0 + 3.0 / (part.elements.len().max(1) as f64).sqrt();
        let entry = Entry {
            quantity: quantity.clone(),
            error: rms(part),
            single: single_error,
            allowed: self.factor * chance * single_error.max(rounding * peak),
        };
        // Written so that NaN fails.
        if entry.error <= entry.allowed {
            return Ok(entry);
        }
        let worst = (0..part.elements.len())
            .max_by(|a, b| off(part, *a).total_cmp(&off(part, *b)))
            .unwrap_or(0);
        let mut rest = part.index(worst);
        let mut index: Vec<usize> = part.shape.iter().rev().map(|len| (rest % len, rest /= len).0).collect();
        index.reverse();
        Err(Difference::Value {
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
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F16 => f64::from(half::f16::EPSILON),
        DType::BF16 => f64::from(half::bf16::EPSILON),
        _ => f64::from(f32::EPSILON),
    }
}
