use std::collections::{BTreeMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use burn_sp_comm::{CommError, Site, raise};
use safetensors::tensor::Metadata;

use super::optimizer::{Moments, Record};
use super::plan::{burn_dtype, moment_name, moment_of, scalar_of};
use super::{SavedState, StateError, StateInfo, StateStore, StatefulOptimizer};

/// See [`StateStore::load`].
pub(super) fn load<M: Module, O: StatefulOptimizer>(
    store: &StateStore,
    module: M,
    optimizer: O,
    site: Site,
) -> Result<(M, O, StateInfo), StateError> {
    let _span = tracing::trace_span!("load").entered();
    let mut saved = None;
    let open = || {
        let state = SavedState::open(&store.folder)?;
        check(store, &module, &state)?;
        let contents = (state.info().clone(), state.metadata.clone());
        saved = Some(state);
        Ok(contents)
    };
    let (info, metadata): (StateInfo, Metadata) = store.made_by_first(open, site)?;
    let mut fields: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let names = metadata.offset_keys();
    for (path, field) in names.iter().filter_map(|name| moment_of(name)) {
        fields.entry(path).or_default().push(field);
    }
    let mut stream = Stream {
        store,
        shared: optimizer.is_shared(),
        metadata: &metadata,
        fields,
        saved: &mut saved,
        failed: None,
        path: Vec::new(),
        record: Record::default(),
        site,
    };
    let module = module.map(&mut stream);
    let (failed, record) = (stream.failed, stream.record);

    let given = record.tensors();
    let record = record.finish();
    let record = record.unwrap_or_else(|error| raise(CommError::failed(store.device.rank(), error)));
    let optimizer = optimizer.with_record(record);
    let verdict = || {
        if let Some(error) = failed {
            return Err(error);
        }
        // Burn leaves out what an optimizer does not know.
        let taken = optimizer.optimizer().to_record().len();
        match taken == given {
            true => Ok(()),
            false => Err(StateError::Optimizer {
                state: saved.map_or(String::new(), |state| state.folder().display().to_string()),
                saved: given,
                taken,
            }),
        }
    };
    store.made_by_first(verdict, site)?;
    Ok((module, optimizer, info))
}

/// Whether the state has the module's parameters, in their whole shapes, and nothing else. On rank 0.
fn check<M: Module>(store: &StateStore, module: &M, state: &SavedState) -> Result<(), StateError> {
    let mut check = Check {
        store,
        state,
        path: Vec::new(),
        known: HashSet::new(),
        failed: None,
    };
    module.visit(&mut check);
    if let Some(error) = check.failed {
        return Err(error);
    }
    let names = state.metadata.offset_keys().into_iter();
    let known = |name: &str| {
        let path = moment_of(name).map_or(name, |(path, _)| path);
        check.known.contains(path)
    };
    // Parameters first.
    match names
        .filter(|name| !known(name))
        .min_by_key(|name| moment_of(name).is_some())
    {
        Some(name) => Err(StateError::Unknown {
            state: state.folder().display().to_string(),
            saved: check.saved(&name).unwrap_or_default(),
            name,
        }),
        None => Ok(()),
    }
}

struct Check<'a> {
    store: &'a StateStore,
    state: &'a SavedState,
    path: Vec<String>,
    known: HashSet<String>,
    failed: Option<StateError>,
}

impl Check<'_> {
    fn saved(&self, name: &str) -> Option<Vec<usize>> {
        self.state.metadata.info(name).map(|info| info.shape.clone())
    }

    fn look(&mut self, model: Vec<usize>) {
        let (state, name) = (self.state.folder().display().to_string(), self.path.join("."));
        let error = match self.saved(&name) {
            None => Some(StateError::Lacking {
                state,
                name: name.clone(),
                model,
            }),
            Some(saved) if saved != model => Some(StateError::Shape {
                state,
                name: name.clone(),
                saved,
                model,
            }),
            Some(_) => None,
        };
        self.known.insert(name);
        self.failed = self.failed.take().or(error);
    }
}

impl ModuleVisitor for Check<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.look(self.store.share(param.id).whole_shape(&param.dims()));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.look(param.dims().to_vec());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.look(param.dims().to_vec());
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// Brings the tensors from rank 0, parameter by parameter, and keeps this rank's parts.
struct Stream<'a> {
    store: &'a StateStore,
    shared: bool,
    metadata: &'a Metadata,
    /// What an optimizer kept, by parameter.
    fields: BTreeMap<&'a str, Vec<&'a str>>,
    /// On rank 0.
    saved: &'a mut Option<SavedState>,
    /// What rank 0 could not read.
    failed: Option<StateError>,
    path: Vec<String>,
    record: Record,
    site: Site,
}

impl Stream<'_> {
    /// A whole tensor that the state has. Collective.
    fn whole(&mut self, name: &str) -> TensorData {
        let info = self.metadata.info(name).expect("the state has been checked");
        let bytes = self.saved.as_mut().map(|saved| match saved.bytes(name) {
            Ok(bytes) => bytes,
            // The others wait for something; all hear of it in the end.
            Err(error) => {
                self.failed.get_or_insert(error);
                vec![0; info.data_offsets.1 - info.data_offsets.0]
            }
        });
        let bytes = self.store.bytes_from_first(bytes, self.site);
        // Rank 0 must not read ahead of the others: what is on its way takes memory.
        let world = self.store.device.mesh().world();
        world.barrier().unwrap_or_else(|error| raise(error));
        let Some(dtype) = burn_dtype(info.dtype) else {
            let error = format!("{name} is of {:?}, which Burn has not", info.dtype);
            raise(CommError::failed(self.store.device.rank(), error))
        };
        TensorData::from_bytes_vec(bytes, info.shape.clone(), dtype)
    }

    /// Keeps this rank's part of what the optimizer knew of a parameter, which has this shape on this rank.
    fn take_moments<const D: usize>(&mut self, id: ParamId, path: &str, own: [usize; D]) {
        let Some(fields) = self.fields.get(path).cloned() else {
            return;
        };
        let share = self.store.moment_share(id, &own, self.shared, self.site);
        let whole_shape = share.whole_shape(&own);
        let device = self.store.device.device().clone().inner();
        let mut moments = Moments::default();
        for field in fields {
            let data = self.whole(&moment_name(path, field));
            let info = self.metadata.info(&moment_name(path, field));
            let scalar = info.filter(|info| info.shape.is_empty());
            let scalar = scalar.and_then(|info| scalar_of(info.dtype, data.as_bytes()));
            if let Some(scalar) = scalar {
                moments.scalars.push((field.to_owned(), scalar));
                continue;
            }
            let data = match share.is_whole() || data.shape().to_vec() != whole_shape {
                true => data,
                false => {
                    let dtype = data.dtype();
                    let whole = Tensor::<D>::from_data(data, (&device, dtype));
                    share.part(whole, &self.store.device).into_data()
                }
            };
            moments.tensors.push((field.to_owned(), data));
        }
        // An optimizer never updates what a rank has none of.
        if !share.is_nothing() {
            self.record.add(id, path, D, moments);
        }
    }
}

impl ModuleMapper for Stream<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, path) = (param.id, self.path.join("."));
        let whole = self.whole(&path);
        let share = self.store.share(id);
        let param = param.map(|old| {
            let (tracked, device, dtype) = (old.is_require_grad(), old.device(), old.dtype());
            let whole = whole.convert_dtype(dtype);
            let own = match share.is_whole() {
                true => whole,
                false => {
                    let whole = Tensor::<D>::from_data(whole, (&device.clone().inner(), dtype));
                    share.part(whole, &self.store.device).into_data()
                }
            };
            Tensor::from_data(own, (&device, dtype)).set_require_grad(tracked)
        });
        self.take_moments(id, &path, param.dims());
        param
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let whole = self.whole(&self.path.join("."));
        param.map(|old| {
            let dtype = old.dtype();
            Tensor::from_data(whole.convert_dtype(dtype), (&old.device(), dtype))
        })
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        let whole = self.whole(&self.path.join("."));
        param.map(|old| Tensor::from_data(whole, &old.device()))
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}
