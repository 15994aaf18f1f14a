//! Training state on disk: saved whole, loaded onto any mesh.

mod error;
mod folder;
mod load;
mod optimizer;
mod plan;
mod save;
mod share;
mod weights;
mod whole;
mod write;

use std::path::PathBuf;

use burn::module::{Module, ParamId};
use burn::tensor::{Bytes, DType};
use burn_sp_comm::{Buffer, Site, raise};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub use error::StateError;
pub use folder::{SavedState, saved_states};
pub use optimizer::StatefulOptimizer;
pub use whole::whole_module;

use super::shards::Cut;
use super::{ParamLayouts, ParamShards};
use crate::{SpDevice, one_model::buffer_of_first};
use share::Share;

/// What a state says of its run, beside the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StateInfo {
    /// How many steps have been done.
    pub step: u64,
    /// Whatever the run draws is a function of this and the step: the order of the data, noise, dropout.
    pub seed: u64,
    /// What else a run must know to go on, as it likes; floats come back within a rounding.
    pub config: serde_json::Value,
}

/// Saves the state of a training run in a folder, and loads the newest.
///
/// A state is a folder `step-000010` with two files: `state.safetensors`, every parameter by its path in the module and
/// every tensor and number of the optimizer as `optimizer/<path>/<name>` (for AdamW `momentum.moment_1`,
/// `momentum.moment_2` and `momentum.time`), all of them whole, and `state.json`, with [`StateInfo`], the format's version
/// and the checksum of the first. So it does not depend on the mesh: saved by 4 ranks that share out parameters over `tp`
/// or [`shard_parameters`](super::shard_parameters), and the optimizer's state by
/// [`ShardedOptimizer`](super::ShardedOptimizer), it goes on on any ranks that share out anything else.
///
/// It is written beside under another name (`.step-000010.tmp`) and renamed when all of it is on the disk: whenever a
/// process or machine ends, there is a whole state, the new one or the one before. The newest two are kept, older ones
/// removed after that. What was left half-written is removed at the next save. One run at a time may save in a folder.
///
/// Rank 0 writes and reads, all others need no disk. Parameters travel one by one, so no rank ever holds more than one that
/// is whole beside its own. Every rank calls the same, with its own module; all of them get the same error. The others
/// wait for rank 0's disk no longer than for any collective (see [`LaunchConfig`](crate::LaunchConfig)): for a parameter
/// while it is written or read, at the end for all of the file to reach the disk, and when loading for the checksum.
///
/// # Example
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
/// use burn_sp::train::{StateInfo, StateStore};
///
/// fn step(linear: Linear, optimizer: &mut ModuleOptimizer, device: &SpDevice) -> Linear {
///     let x = device.distribute(Tensor::<2>::ones([4, 3], device.device()), &device.sequence_layout([4, 3]));
///     let loss = LossShare::mean(x.tokenwise(|x| linear.forward(x)));
///     let gradients = GradientsParams::from_grads(loss.backward(), &linear);
///     let gradients = sum_gradients(&linear, gradients, &ParamLayouts::replicated(), device.mesh());
///     optimizer.step(0.1, linear, gradients)
/// }
///
/// let folder = std::env::temp_dir().join(format!("states-{}", std::process::id()));
/// # let device = Device::flex().autodiff();
/// # let linear = |device: &SpDevice| device.seeded(1, |device| LinearConfig::new(3, 3).init(device));
/// let saved = launch(&LaunchConfig::new(MeshShape::default().with_dp(2)), &device, |device: SpDevice| {
///     let (mut linear, mut adamw) = (linear(&device), AdamWConfig::new().init());
///     let store = StateStore::new(&folder, &device);
///     for done in 1..=3 {
///         linear = step(linear, &mut adamw, &device);
///         let info = StateInfo { step: done, seed: 1, config: "anything".into() };
///         store.save(&info, &linear, &adamw).unwrap();
///     }
///     step(linear, &mut adamw, &device).weight.val().into_data()
/// })?;
///
/// let resumed = launch(&LaunchConfig::new(MeshShape::default()), &device, |device: SpDevice| {
///     let store = StateStore::new(&folder, &device);
///     let (linear, mut adamw, info) = store.load(linear(&device), AdamWConfig::new().init()).unwrap();
///     assert_eq!(info.step, 3);
///     step(linear, &mut adamw, &device).weight.val().into_data()
/// })?;
/// saved[0].assert_approx_eq::<f32>(&resumed[0], Default::default());
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StateStore {
    folder: PathBuf,
    device: SpDevice,
    layouts: ParamLayouts,
    shards: ParamShards,
}

impl StateStore {
    /// A store in a folder, which is made when a state is saved. To load, it may also be the folder of one state.
    pub fn new(folder: impl Into<PathBuf>, device: &SpDevice) -> Self {
        Self {
            folder: folder.into(),
            device: device.clone(),
            layouts: ParamLayouts::replicated(),
            shards: ParamShards::default(),
        }
    }

    /// For a module that is sharded like this.
    pub fn with_layouts(self, layouts: &ParamLayouts) -> Self {
        Self {
            layouts: layouts.clone(),
            ..self
        }
    }

    /// For a module whose parameters are shared out like this.
    pub fn with_shards(self, shards: &ParamShards) -> Self {
        Self {
            shards: shards.clone(),
            ..self
        }
    }

    /// Saves the state after a step, as the newest; returns its folder. Collective.
    ///
    /// # Errors
    /// If a state of this or a later step is there, a file cannot be written, or the optimizer's state cannot be put together.
    /// What was saved before stays, and nothing of the new state.
    ///
    /// # Panics
    /// If a rank fails meanwhile (in a launched rank: every rank fails with a report).
    #[track_caller]
    pub fn save<M: Module, O: StatefulOptimizer>(
        &self,
        info: &StateInfo,
        module: &M,
        optimizer: &O,
    ) -> Result<PathBuf, StateError> {
        save::save(self, info, module, optimizer, Site::here())
    }

    /// Loads the newest state, or the one whose folder this is, into a module of the same parameters and an optimizer of the
    /// same kind; both keep their devices, and parameters their dtype. Collective.
    ///
    /// Burn rebuilds an optimizer's state on its default device (`BURN_DEVICE` names another) and moves it to the
    /// parameter's at the next step.
    ///
    /// # Errors
    /// If there is no state, it is damaged or of another version, or is one of another module or optimizer.
    ///
    /// # Panics
    /// If a rank fails meanwhile (in a launched rank: every rank fails with a report).
    #[track_caller]
    pub fn load<M: Module, O: StatefulOptimizer>(
        &self,
        module: M,
        optimizer: O,
    ) -> Result<(M, O, StateInfo), StateError> {
        load::load(self, module, optimizer, Site::here())
    }

    /// How the ranks hold a parameter.
    fn share(&self, id: ParamId) -> Share {
        Share::of(id, &self.layouts, &self.shards)
    }

    /// How the ranks hold the optimizer's state of a parameter, which has this shape on this rank.
    fn moment_share(&self, id: ParamId, shape: &[usize], shared: bool, site: Site) -> Share {
        if !shared {
            return self.share(id);
        }
        let mesh = self.device.mesh();
        let axes = self.layouts.replicated_axes(id, mesh);
        let comm = mesh.group(&axes).unwrap_or_else(|error| raise(error));
        // What a rank has none of, after `tp` has split it, is not shared out.
        let shared = comm.size() > 1 && !shape.contains(&0);
        let cut = shared.then(|| Cut::new(shape.to_vec(), comm, site));
        Share::new(self.layouts.layout(id).cloned(), cut)
    }

    fn is_first(&self) -> bool {
        self.device.rank() == 0
    }

    /// What rank 0 makes of it, on every rank.
    fn made_by_first<T: Serialize + DeserializeOwned>(
        &self,
        make: impl FnOnce() -> Result<T, StateError>,
        site: Site,
    ) -> Result<T, StateError> {
        let made = self.is_first().then(make);
        if self.device.mesh().world().size() == 1 {
            return made.expect("rank 0 makes it");
        }
        let json = made.map(|made| serde_json::to_vec(&made).expect("plain values become JSON"));
        let json = self.bytes_from_first(json, site);
        serde_json::from_slice(&json).expect("rank 0 sends what it made")
    }

    /// Rank 0's bytes, on every rank.
    fn bytes_from_first(&self, bytes: Option<Vec<u8>>, site: Site) -> Vec<u8> {
        let world = self.device.mesh().world();
        let own = match bytes {
            Some(bytes) if world.size() == 1 => return bytes,
            Some(bytes) => {
                let length = bytes.len();
                let buffer = Buffer::contiguous(Bytes::from_bytes_vec(bytes), vec![length], DType::U8);
                Some(buffer.unwrap_or_else(|error| raise(error)))
            }
            None => None,
        };
        let bytes = buffer_of_first(own, world.as_ref(), site).into_bytes();
        let bytes = bytes.unwrap_or_else(|error| raise(error));
        bytes.try_into_vec().unwrap_or_else(|shared| shared.to_vec())
    }
}
