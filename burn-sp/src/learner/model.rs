use std::fmt::{self, Debug, Display};

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer, MultiGradientsParams};
use burn::tensor::Device;
use burn::train::{InferenceStep, ItemLazy, TrainOutput, TrainStep};

use super::edit::pending;
use crate::layout::MeshShape;
use crate::train::{LossShare, ParamLayouts, clip_by_global_norm, sum_gradients};
use crate::{LaunchConfig, SpDevice, launch};

/// A model that [`SpModel`] trains: what Burn's `TrainStep` and `InferenceStep` are on one device.
pub trait SpStep: Module + Display + 'static {
    /// What a data loader gives: whole, and the same on every rank.
    type Input: Clone + Send + 'static;
    /// What metrics see of a step. It must be the same on every rank, as [`TokenOutput`](super::TokenOutput) is: metrics
    /// hear rank 0's alone, and nothing checks it. Of logits of a rank's own tokens, say, in Burn's `ClassificationOutput`, an
    /// accuracy would be that of rank 0's slice of the sequence, a plausible number.
    type Output: ItemLazy + 'static;

    /// A step of training or, on a device without autodiff, of validation: takes this rank's part of the item
    /// ([`SpDevice::distribute`]) and returns this rank's share of the loss. Collective.
    ///
    /// Whatever it draws must not depend on the layout; Burn's loop does not number steps, so let the items bring numbers.
    fn step(&self, item: Self::Input, device: &SpDevice) -> (LossShare, Self::Output);

    /// This rank's part of the whole model, and how its parameters lie. All of it, unless a model does
    /// [tensor parallelism](crate::nn). Parameters must keep their ids, and modules their paths.
    ///
    /// The optimizer then sees a part of a sharded parameter, so it must treat elements one by one, as SGD, Adam and AdamW
    /// do. One that looks at a whole tensor (the norms of LAMB, the rows and columns of Muon and Adafactor) computes
    /// something else than on one device; shapes do not show it, so nothing checks it.
    fn shard(self, device: &SpDevice) -> (Self, ParamLayouts) {
        let _ = device;
        (self, ParamLayouts::replicated())
    }

    /// The item on another device; an item without tensors, as [`TokenItem`](super::TokenItem), as it is. Ranks that are
    /// threads share one data loader, which puts items on the first rank's; with a device for each rank, the others need
    /// this.
    ///
    /// # Panics
    /// Unless it is implemented.
    fn move_item(item: Self::Input, device: &Device) -> Self::Input {
        let _ = item;
        panic!(
            "learner: ranks share a data loader but not a device: implement SpStep::move_item, to move items to {device:?}"
        );
    }
}

/// A model for Burn's [`Learner`](burn::train::Learner) that steps as one rank of a mesh, where
/// [`SequenceParallel`](super::SequenceParallel) has put it; as the only rank, anywhere else.
///
/// It is transparent as a module: parameters have the paths that they have in the model.
#[derive(Clone, Debug)]
pub struct SpModel<M> {
    model: M,
    max_norm: Option<f64>,
    seat: Option<Seat>,
}

/// A place on a mesh.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub device: SpDevice,
    pub layouts: ParamLayouts,
}

impl<M: SpStep> SpModel<M> {
    /// A whole model.
    pub fn new(model: M) -> Self {
        Self {
            model,
            max_norm: None,
            seat: None,
        }
    }

    /// Clips gradients before each update so that their norm, over all parameters and ranks, is at most this; see
    /// [`clip_by_global_norm`]. An optimizer's own clipping, if it has one, comes after it.
    pub fn with_clipping(self, max_norm: f64) -> Self {
        let max_norm = Some(max_norm);
        Self { max_norm, ..self }
    }

    /// The model.
    pub fn inner(&self) -> &M {
        &self.model
    }

    /// [`inner`](Self::inner), by value.
    pub fn into_inner(self) -> M {
        self.model
    }

    /// With this model instead, seated there.
    pub(super) fn seated(self, model: M, seat: Option<Seat>) -> Self {
        Self { model, seat, ..self }
    }

    /// What its gradients are clipped at.
    pub(super) fn max_norm(&self) -> Option<f64> {
        self.max_norm
    }

    /// Where it is on a mesh.
    ///
    /// # Panics
    /// If it is on none.
    pub(super) fn seat(&self) -> &Seat {
        self.seat.as_ref().expect("a rank's model has a seat")
    }

    /// Where a step runs.
    fn device(&self) -> SpDevice {
        match &self.seat {
            Some(seat) => seat.device.clone(),
            None => alone(&self.model),
        }
    }

    fn clipped(&self, grads: GradientsParams) -> GradientsParams {
        if self.max_norm.is_none() {
            return grads;
        }
        let (device, whole) = (self.device(), ParamLayouts::replicated());
        let layouts = self.seat.as_ref().map_or(&whole, |seat| &seat.layouts);
        clip_by_global_norm(&self.model, grads, self.max_norm, layouts, device.mesh()).0
    }
}

/// A mesh of one rank, whose collectives need nobody.
fn alone<M: Module>(model: &M) -> SpDevice {
    let devices = model.devices();
    let device = devices.first().expect("a model that is trained has parameters");
    let mut ranks = launch(&LaunchConfig::new(MeshShape::default()), device, |device| device)
        .unwrap_or_else(|error| panic!("learner: {error}"));
    ranks.remove(0)
}

impl Seat {
    fn on(self, device: Device) -> Self {
        let device = SpDevice::new(device, self.device.mesh().clone());
        Self { device, ..self }
    }
}

impl<M: SpStep> TrainStep for SpModel<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: M::Input) -> TrainOutput<M::Output> {
        let (loss, output) = self.model.step(item, &self.device());
        TrainOutput::new(self, loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, lr: ModuleLearningRate, grads: GradientsParams) -> Self {
        if let Some(edit) = pending() {
            return edit(self, optimizer);
        }
        let grads = match &self.seat {
            Some(Seat { device, layouts }) => sum_gradients(&self.model, grads, layouts, device.mesh()),
            None => grads,
        };
        let grads = self.clipped(grads);
        optimizer.step(lr, self, grads)
    }

    /// For Burn's own strategies on several devices.
    ///
    /// # Panics
    /// If it was to clip: those sum gradients inside the optimizer.
    fn optimize_multi(
        self,
        optimizer: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: MultiGradientsParams,
    ) -> Self {
        assert!(
            self.max_norm.is_none(),
            "learner: Burn's strategy for several devices cannot clip by the global norm; use SequenceParallel, with dp"
        );
        optimizer.step_multi(lr, self, grads)
    }
}

impl<M: SpStep> InferenceStep for SpModel<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: M::Input) -> M::Output {
        self.model.step(item, &self.device()).1
    }
}

impl<M: SpStep> Display for SpModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(&self.model, f)
    }
}

impl<M: SpStep> Module for SpModel<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.model.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        let model = self.model.fork(device);
        Self { model, ..self }
    }

    fn to_device(self, device: &Device) -> Self {
        let model = self.model.to_device(device);
        Self { model, ..self }
    }

    fn train(self) -> Self {
        Self {
            model: self.model.train(),
            max_norm: self.max_norm,
            seat: self.seat.map(|seat| {
                let device = seat.device.device().clone();
                let autodiff = device.is_autodiff();
                seat.on(if autodiff { device } else { device.autodiff() })
            }),
        }
    }

    fn valid(&self) -> Self {
        Self {
            model: self.model.valid(),
            max_norm: self.max_norm,
            seat: self.seat.clone().map(|seat| {
                let device = seat.device.device().clone().inner();
                seat.on(device)
            }),
        }
    }

    fn materialize(self) -> Self {
        let model = self.model.materialize();
        Self { model, ..self }
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        self.model.visit(visitor);
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        let model = self.model.map(mapper);
        Self { model, ..self }
    }
}
