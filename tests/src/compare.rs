use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::{DType, Device, TensorData};
use burn_sp::layout::MeshShape;
use burn_sp::train::ParamLayouts;
use burn_sp::{LaunchConfig, SpDevice, launch_module};

use crate::diagnosis::{Again, Scene, diagnose};
use crate::judge::{Judge, epsilon};
use crate::outcome::Inputs;
use crate::run::{Detail, Run};
use crate::values::whole_parameters;
use crate::{Deviation, Diagnosis, Difference, Entry, Outcome, Quantity, Rank, Report, Values, cast, dtype_of};

/// Takes a rank's part of a whole module, and says which parameters are sharded.
type Shard<M> = Box<dyn Fn(M, &SpDevice) -> (M, ParamLayouts) + Send + Sync>;

/// Runs a closure on simulated ranks and compares it with itself on one rank: outputs, loss, and the gradient of every
/// parameter and input.
///
/// The tolerance is never a guess. The closure also runs on one rank in f64; how far one rank in the model's own dtype is
/// from that is the error that the dtype costs, and a sharded run may be off by [`FACTOR`](Self::FACTOR) times as much.
/// Errors are root mean squares over a tensor. Two allowances are made for chance: a tensor of n elements may have
/// `1 + 3 / sqrt(n)` times that, and one rank's error counts as at least one rounding of the largest element (of all
/// gradients, for a gradient that is truly 0). The rounding of a dtype narrower than f32 would hide small faults, one lost label in
/// a thousand, say: with such a model the ranks run in f64 too.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, TensorData};
/// use burn_sp::prelude::*;
/// use burn_sp_tests::{Comparison, Outcome};
///
/// let linear = LinearConfig::new(3, 2).init(&Device::flex());
/// let x = TensorData::new((0..15).map(|i| (i as f32).sin()).collect::<Vec<_>>(), [1, 5, 3]);
/// let report = Comparison::new(linear).input("x", x).on([MeshShape::ring(3)]).run(|rank, linear| {
///     let x = rank.input::<3>("x");
///     let x = rank.device().distribute(x, &rank.device().sequence_layout([1, 5, 3]));
///     Outcome::new(LossShare::mean(x.tokenwise(|x| linear.forward(x))))
/// })?;
/// let (mesh, entries) = &report.meshes[0];
/// assert_eq!(*mesh, MeshShape::ring(3));
/// // The loss, and the gradients of weight, bias and x.
/// assert_eq!(entries.len(), 4);
/// assert!(entries.iter().all(|entry| entry.error <= entry.allowed));
/// # Ok::<(), burn_sp_tests::Difference>(())
/// ```
///
/// The crate's documentation has one of a comparison that fails.
pub struct Comparison<M> {
    module: M,
    shard: Shard<M>,
    device: Device,
    inputs: Inputs,
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

    /// Gives the closure a tensor under a name, of floats or of ints; see [`Rank::input`] and [`Rank::int_input`].
    ///
    /// # Shapes
    /// - `data`: any; if something differs, single tokens of a `[batch, tokens, ...]` are changed to find out why
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

    /// How long a rank may wait for its peers; 30 seconds if nothing else is said.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Another factor than [`FACTOR`](Self::FACTOR), by which one rank's error is multiplied.
    pub fn with_factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Runs the closure everywhere and compares; on one rank in f64 it runs twice, and has to give the same numbers. If something
    /// differs, it runs some more times, with single tokens changed, to find out why.
    ///
    /// # Errors
    /// Everything that differs, and the likely fault; see [`Difference`].
    pub fn run<F>(&self, body: F) -> Result<Report, Difference>
    where
        F: Fn(&Rank, &M) -> Outcome + Send + Sync,
    {
        let dtype = dtype_of(&self.module).unwrap_or(DType::F32);
        let one = MeshShape::default();
        let failed = |deviation| Difference {
            deviations: vec![deviation],
            diagnosis: None,
        };
        let exact = Exact {
            comparison: self,
            body: &body,
        };
        let reference = || {
            let runs = exact.run(one, &self.inputs, Detail::Compare);
            runs.map_err(|error| failed(Deviation::Reference { error }))
        };
        let (truth, again) = (reference()?.remove(0), reference()?);
        // With other random numbers in every run, each would be as far from the others as a broken one.
        if let Err(deviations) = Judge::new(one, DType::F64, EXACT, &truth, &truth).ranks(&again) {
            let diagnosis = Some(Box::new(Diagnosis::unrepeated(&deviations[0])));
            return Err(Difference { deviations, diagnosis });
        }
        drop(again);
        let single = self.launch(&self.device, one, dtype, &self.inputs, Detail::Compare, &body);
        let single = single.map_err(|error| failed(Deviation::Failed { mesh: one, error }))?;

        let mut meshes = Vec::new();
        let mut deviations = Vec::new();
        let mut diagnosis = None;
        for mesh in self.meshes.iter().copied() {
            match self.on_mesh(mesh, dtype, &truth, &single[0], &exact) {
                Ok(entries) => meshes.push((mesh, entries)),
                Err(found) => {
                    if deviations.is_empty() && !matches!(found[0], Deviation::Failed { .. }) {
                        diagnosis = self.explain(mesh, &truth, &found, &exact).map(Box::new);
                    }
                    deviations.extend(found);
                }
            }
        }
        if deviations.is_empty() {
            Ok(Report { meshes })
        } else {
            Err(Difference { deviations, diagnosis })
        }
    }

    fn on_mesh<F>(
        &self,
        mesh: MeshShape,
        dtype: DType,
        truth: &Run,
        single: &Run,
        exact: &Exact<'_, M, F>,
    ) -> Result<Vec<Entry>, Vec<Deviation>>
    where
        F: Fn(&Rank, &M) -> Outcome + Send + Sync,
    {
        let failed = |error| vec![Deviation::Failed { mesh, error }];
        let ranks = self.launch(&self.device, mesh, dtype, &self.inputs, Detail::Compare, exact.body);
        let entries = Judge::new(mesh, dtype, self.factor, truth, single).ranks(&ranks.map_err(failed)?)?;
        if epsilon(dtype) > epsilon(DType::F32) {
            let ranks = exact.run(mesh, &self.inputs, Detail::Compare).map_err(failed)?;
            Judge::new(mesh, DType::F64, SMALL, truth, truth).ranks(&ranks)?;
        }
        Ok(entries)
    }

    /// Looks at a mesh again in f64. None if its ranks fail then.
    fn explain<F>(
        &self,
        mesh: MeshShape,
        truth: &Run,
        found: &[Deviation],
        exact: &Exact<'_, M, F>,
    ) -> Option<Diagnosis>
    where
        F: Fn(&Rank, &M) -> Outcome + Send + Sync,
    {
        let ranks = exact.run(mesh, &self.inputs, Detail::Compare).ok()?;
        let Err(deviations) = Judge::new(mesh, DType::F64, EXACT, truth, truth).ranks(&ranks) else {
            let agree = "in f64, on Flex, the same ranks agree with one rank";
            return Some(Diagnosis::rounding(&found[0], agree.to_owned()));
        };
        // A closure that casts to f32 inside rounds in f64 too.
        let error = |deviations| found[0].quantity().and_then(|first| error_of(deviations, first));
        if let (Some(error), Some(exact)) = (error(found), error(&deviations))
            && exact < 0.01 * error
        {
            let less = format!("in f64, on Flex, the same ranks are off by {exact:.3e} only");
            return Some(Diagnosis::rounding(&found[0], less));
        }
        Some(diagnose(&Scene {
            mesh,
            truth,
            ranks: &ranks,
            deviations: &deviations,
            inputs: &self.inputs,
            again: exact,
            failed: Cell::new(false),
        }))
    }

    fn launch<F>(
        &self,
        device: &Device,
        mesh: MeshShape,
        dtype: DType,
        inputs: &Inputs,
        detail: Detail,
        body: &F,
    ) -> Result<Vec<Run>, burn_sp::Error>
    where
        F: Fn(&Rank, &M) -> Outcome + Send + Sync,
    {
        let config = LaunchConfig::new(mesh).with_timeout(self.timeout);
        let module = cast(self.module.clone(), dtype).train();
        let shard = &self.shard;
        launch_module(&config, device, module, |device, module| {
            let (module, layouts) = shard(module, &device);
            let rank = Rank::new(device, dtype, layouts, inputs.clone());
            let outcome = body(&rank, &module);
            Run::of(outcome, &rank, &module, detail)
        })
    }
}

/// Two f64 runs may be so many roundings of the largest element apart.
const EXACT: f64 = 1e4;
/// Those that look for what a narrow dtype hides: 100 roundings of f32, to which a closure may cast inside.
const SMALL: f64 = 100.0 * (f32::EPSILON as f64 / f64::EPSILON);

/// The largest error of a quantity, if it is off by value.
fn error_of(deviations: &[Deviation], quantity: &Quantity) -> Option<f64> {
    let errors = deviations.iter().filter_map(|deviation| match deviation {
        Deviation::Value { entry, .. } if entry.quantity == *quantity => Some(entry.error),
        _ => None,
    });
    errors.reduce(f64::max)
}

/// The comparison's closure, to be run again in f64, which Flex has.
struct Exact<'a, M, F> {
    comparison: &'a Comparison<M>,
    body: &'a F,
}

impl<M, F> Again for Exact<'_, M, F>
where
    M: Module,
    F: Fn(&Rank, &M) -> Outcome + Send + Sync,
{
    fn run(&self, mesh: MeshShape, inputs: &Inputs, detail: Detail) -> Result<Vec<Run>, burn_sp::Error> {
        let device = Device::flex().autodiff();
        self.comparison
            .launch(&device, mesh, DType::F64, inputs, detail, self.body)
    }

    fn parameters(&self, mesh: MeshShape) -> Result<Vec<BTreeMap<String, Values>>, burn_sp::Error> {
        let comparison = self.comparison;
        let config = LaunchConfig::new(mesh).with_timeout(comparison.timeout);
        let module = cast(comparison.module.clone(), DType::F64).train();
        let shard = &comparison.shard;
        launch_module(&config, &Device::flex().autodiff(), module, |device, module| {
            let (module, layouts) = shard(module, &device);
            whole_parameters(&module, &layouts, &device)
        })
    }
}
