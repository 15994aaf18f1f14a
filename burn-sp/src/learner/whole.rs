//! What ranks share out, put together for a checkpoint, and shared out when training goes on from one.

use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::OptimizerRecord;
use burn::tensor::{Tensor, TensorData};
use burn::train::Learner;
use burn_sp_comm::{CommError, raise};

use super::edit::edit;
use super::model::Seat;
use super::moments::{Held, Moments};
use super::{SpModel, SpStep};
use crate::train::{ParamLayouts, ParamShards, whole_module};
use crate::{SpDevice, SpTensor, layout::Layout};

/// The layout of a parameter of which ranks hold different parts.
fn shared_layout(layouts: &ParamLayouts, id: ParamId, device: &SpDevice) -> Option<Layout> {
    let mut axes = layouts.sharded_axes(id).into_iter();
    let split = axes.any(|axis| device.mesh().size(axis) > 1);
    layouts.layout(id).filter(|_| split).cloned()
}

/// What ranks share out of a model.
#[derive(Default)]
pub(super) struct Shared {
    /// Whether there is anything.
    pub some: bool,
    /// A parameter of which this rank has nothing, by its path.
    pub nothing_of: Option<String>,
}

impl Shared {
    pub fn of<M: Module>(part: &M, Seat { device, layouts }: &Seat) -> Self {
        struct Look<'a> {
            seat: (&'a ParamLayouts, &'a SpDevice),
            path: Vec<String>,
            shared: Shared,
        }

        impl ModuleVisitor for Look<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let (layouts, device) = self.seat;
                if shared_layout(layouts, param.id, device).is_some() {
                    self.shared.some = true;
                    if param.dims().contains(&0) {
                        self.shared.nothing_of = Some(self.path.join("."));
                    }
                }
            }

            fn enter_module(&mut self, name: &str, _container: &str) {
                self.path.push(name.to_owned());
            }

            fn exit_module(&mut self, _name: &str, _container: &str) {
                self.path.pop();
            }
        }

        let mut look = Look {
            seat: (layouts, device),
            path: Vec::new(),
            shared: Shared::default(),
        };
        part.visit(&mut look);
        look.shared
    }
}

/// On rank 0, a learner of which checkpoints are made: with the parameters of the whole model and the optimizer's state of
/// all of it, in host memory. Collective.
pub(super) fn whole_learner<M: SpStep>(learner: &Learner<SpModel<M>>) -> Option<Learner<SpModel<M>>> {
    let mut whole = learner.clone();
    edit(&mut whole, |part, optimizer| {
        let seat = part.seat().clone();
        let moments = turned(optimizer.to_record(), part.inner(), &seat, Way::Gather);
        let Some(model) = whole_module(part.inner(), &seat.layouts, &ParamShards::default(), &seat.device) else {
            return (part, false);
        };
        let (held, record) = Held::new(moments, seat.device.rank());
        *optimizer = optimizer.clone().with_group(ParamGroup::all(), held, None);
        *optimizer = optimizer.clone().load_record(record);
        (part.seated(model, None), true)
    })
    .then_some(whole)
}

/// Of an optimizer's state of the whole model, what belongs to this rank's part.
pub(super) fn own_moments<M: Module>(record: OptimizerRecord, part: &M, seat: &Seat) -> OptimizerRecord {
    turned(record, part, seat, Way::Cut).into_record(seat.device.rank())
}

#[derive(Clone, Copy)]
enum Way {
    /// Parts become the whole, on rank 0; other ranks keep theirs. Collective.
    Gather,
    /// The whole becomes this rank's part.
    Cut,
}

/// An optimizer's state with that of the shared parameters changed.
fn turned<M: Module>(record: OptimizerRecord, part: &M, seat: &Seat, way: Way) -> Moments {
    let moments = Moments::of(record, seat.device.rank());
    let mut turn = Turn { seat, way, moments };
    part.visit(&mut turn);
    turn.moments
}

struct Turn<'a> {
    seat: &'a Seat,
    way: Way,
    moments: Moments,
}

impl ModuleVisitor for Turn<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let device = &self.seat.device;
        let Some(layout) = shared_layout(&self.seat.layouts, param.id, device) else {
            return;
        };
        let plain = device.device().clone().inner();
        for (name, data) in self.moments.of_param(param.id) {
            let from = match self.way {
                Way::Gather => param.dims().to_vec(),
                Way::Cut => layout.shape().to_vec(),
            };
            if data.shape().to_vec() != from {
                let error = format!(
                    "the optimizer keeps {name} of {:?} for a parameter of {from:?} that ranks share out; use one that treats \
                     elements one by one, as Adam and SGD do, or a mesh without tp",
                    data.shape()
                );
                raise(CommError::failed(device.rank(), error));
            }
            let tensor = |data: TensorData| {
                let dtype = data.dtype();
                Tensor::<D>::from_data(data, (&plain, dtype))
            };
            match self.way {
                Way::Gather => {
                    let own = SpTensor::from_local(tensor(data.clone()), layout.clone(), device);
                    let whole = own.gather().into_local();
                    if device.rank() == 0 {
                        *data = whole.into_data();
                    }
                }
                Way::Cut => {
                    *data = device
                        .distribute(tensor(data.clone()), &layout)
                        .into_local()
                        .into_data()
                }
            }
        }
    }
}
