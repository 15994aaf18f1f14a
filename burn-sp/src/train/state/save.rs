use std::path::PathBuf;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, BoolStore, DType, Device, Int, Tensor, TensorData};
use burn_sp_comm::{Buffer, Collective, CommError, Site, Transfer, raise};

use super::folder::name;
use super::optimizer::Moments;
use super::plan::{Plan, SIZES, burn_dtype, element_size, scalar_bytes};
use super::write::Draft;
use super::{StateError, StateInfo, StateStore, StatefulOptimizer};

/// See [`StateStore::save`].
pub(super) fn save<M: Module, O: StatefulOptimizer>(
    store: &StateStore,
    info: &StateInfo,
    module: &M,
    optimizer: &O,
    site: Site,
) -> Result<PathBuf, StateError> {
    let _span = tracing::trace_span!("save", step = info.step).entered();
    let shared = optimizer.is_shared();
    let mut draft = None;
    let begin = || {
        let plan = Plan::new(store, module, optimizer.optimizer(), shared, site)?;
        draft = Some(Draft::begin(&store.folder, info, &plan.header(info))?);
        Ok(plan)
    };
    let plan = store.made_by_first(begin, site)?;
    for size in SIZES {
        let mut stream = Stream {
            store,
            optimizer: optimizer.optimizer(),
            shared,
            plan: &plan,
            draft: &mut draft,
            device: store.device.device().clone().inner(),
            size,
            next: 0,
            site,
        };
        for (_, value) in plan.scalars(size) {
            stream.put(|| scalar_bytes(value).1);
        }
        module.visit(&mut stream);
    }
    // On some engines a rank learns of a failure later than of a result: nothing is published before all are known to be
    // well.
    let world = store.device.mesh().world();
    let met = Transfer {
        op: Collective::Barrier,
        buffer: Buffer::empty(),
    };
    world.run(vec![met], site).unwrap_or_else(|error| raise(error));
    let finish = || draft.map_or(Ok(()), Draft::finish);
    store.made_by_first(finish, site)?;
    Ok(store.folder.join(name(info.step)))
}

/// Brings the tensors whose elements have one size to rank 0, in the order of the file, and writes them there.
struct Stream<'a> {
    store: &'a StateStore,
    optimizer: &'a ModuleOptimizer,
    shared: bool,
    plan: &'a Plan,
    /// On rank 0.
    draft: &'a mut Option<Draft>,
    /// Where tensors are put together.
    device: Device,
    size: usize,
    /// The parameter that is visited next.
    next: usize,
    site: Site,
}

impl Stream<'_> {
    fn put(&mut self, bytes: impl FnOnce() -> Vec<u8>) {
        if let Some(draft) = self.draft {
            draft.write(&bytes());
        }
    }

    fn put_data(&mut self, data: impl FnOnce() -> TensorData) {
        if let Some(draft) = self.draft {
            let data = data();
            let data = match data.dtype() {
                DType::Bool(_) => data.convert_dtype(DType::Bool(BoolStore::Native)),
                _ => data,
            };
            draft.write(data.as_bytes());
        }
    }

    /// A parameter that every rank holds.
    fn put_whole(&mut self, data: impl FnOnce() -> TensorData) {
        let planned = &self.plan.parameters[self.next];
        self.next += 1;
        if element_size(planned.tensor.dtype) == self.size {
            self.put_data(data);
        }
    }
}

impl ModuleVisitor for Stream<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (plan, store) = (self.plan, self.store);
        let planned = &plan.parameters[self.next];
        self.next += 1;
        if element_size(planned.tensor.dtype) == self.size {
            let whole = store.share(param.id).gather(param.val().inner(), &store.device);
            self.put_data(|| whole.into_data());
        }

        let size = self.size;
        let moments = planned.moments.iter();
        let mut moments = moments
            .filter(|(_, entry)| element_size(entry.dtype) == size)
            .peekable();
        let share = store.moment_share(param.id, &param.dims(), self.shared, self.site);
        if moments.peek().is_none() || (share.is_whole() && !store.is_first()) {
            return;
        }
        let own = Moments::of(self.optimizer, param.id, &planned.tensor.name);
        let mut own = own.unwrap_or_else(|error| raise(CommError::failed(store.device.rank(), error)));
        for (field, entry) in moments {
            let data = own.take(field);
            if share.is_whole() {
                self.put_data(|| data.expect("rank 0 has what it planned"));
                continue;
            }
            let part = match data {
                Some(data) => {
                    let dtype = data.dtype();
                    Tensor::<D>::from_data(data, (&self.device, dtype))
                }
                // Of a parameter of fewer elements than ranks.
                None => {
                    let dtype = burn_dtype(entry.dtype).expect("a dtype that Burn has");
                    let mut shape = [1; D];
                    shape[0] = 0;
                    Tensor::empty(shape, (&self.device, dtype))
                }
            };
            let whole = share.gather(part, &store.device);
            self.put_data(|| whole.into_data());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.put_whole(|| param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.put_whole(|| param.val().into_data());
    }
}
