use std::{
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, Devices, Int, Tensor};
#[cfg(feature = "mpi")]
use burn_sp_comm::engines::mpi;
#[cfg(feature = "nccl")]
use burn_sp_comm::engines::nccl;
use burn_sp_comm::{
    Communicator, Site,
    engines::threads::{self, ThreadsConfig},
    raise,
};

use crate::{
    Engine, Error, SpDevice,
    layout::{Mesh, MeshError, MeshShape},
    one_model::of_first,
};

/// How ranks are started.
#[derive(Clone, Debug)]
pub struct LaunchConfig {
    /// The mesh; its product is the number of ranks.
    pub mesh: MeshShape,
    /// How ranks run; threads unless said otherwise.
    pub engine: Engine,
    /// How long a rank waits for its peers before every rank fails with a report.
    pub timeout: Duration,
}

impl LaunchConfig {
    /// A mesh of threads, with the default timeout of one minute.
    pub fn new(mesh: MeshShape) -> Self {
        Self {
            mesh,
            engine: Engine::default(),
            timeout: Duration::from_secs(60),
        }
    }

    /// Sets how ranks run.
    pub fn with_engine(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }

    /// Sets the timeout.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }
}

/// Where ranks keep their tensors: all on one [`Device`], or on several (a slice, a vector or Burn's [`Devices`]), one
/// after another and round again. Ranks that share a device exchange its buffers in place.
pub trait RankDevices: Sync {
    /// The device of a rank, counted over the whole mesh.
    ///
    /// # Panics
    /// If there is no device.
    fn of_rank(&self, rank: usize) -> &Device;
}

impl RankDevices for Device {
    fn of_rank(&self, _rank: usize) -> &Device {
        self
    }
}

impl RankDevices for [Device] {
    fn of_rank(&self, rank: usize) -> &Device {
        assert!(
            !self.is_empty(),
            "launch: ranks need a device, but the list of devices is empty"
        );
        &self[rank % self.len()]
    }
}

impl RankDevices for Vec<Device> {
    fn of_rank(&self, rank: usize) -> &Device {
        self.as_slice().of_rank(rank)
    }
}

impl RankDevices for Devices {
    fn of_rank(&self, rank: usize) -> &Device {
        self[..].of_rank(rank)
    }
}

/// Runs `body` on every rank, each with its own place on the mesh, and returns the results in rank order: of all ranks if
/// they are threads, of this process's one if they are processes. Every process must call it.
///
/// Modules must be built inside `body` (or handed over by [`launch_module`]): an autodiff leaf that two ranks share would
/// make their graphs one, and their backward passes would wait for each other.
///
/// # Errors
/// If the mesh cannot be made, or a rank panics, comes late or calls another collective than its peers. Every rank then
/// ends with the same report, which is returned.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
///
/// let config = LaunchConfig::new(MeshShape::ulysses(2));
/// let sums = launch(&config, &Device::flex(), |device: SpDevice| {
///     let whole = Tensor::<2>::from_floats([[1.0], [2.0], [3.0]], device.device());
///     let layout = Layout::replicated([3, 1]).shard(0, Axis::Ulysses, Split::Contiguous);
///     let mine = device.distribute(whole, &layout);
///     mine.sum_dim(0).gather().into_local().into_scalar::<f32>()
/// })?;
/// assert_eq!(sums, [6.0, 6.0]);
/// # Ok::<(), burn_sp::Error>(())
/// ```
pub fn launch<T, F, D>(config: &LaunchConfig, devices: &D, body: F) -> Result<Vec<T>, Error>
where
    T: Send,
    D: RankDevices + ?Sized,
    F: Fn(SpDevice) -> T + Send + Sync,
{
    check(config)?;
    let on_rank = |world: Arc<dyn Communicator>| match Mesh::new(config.mesh, world) {
        Ok(mesh) => {
            let device = devices.of_rank(mesh.rank()).clone();
            body(SpDevice::new(device, Arc::new(mesh)))
        }
        Err(Error::Comm(error)) => raise(error),
        Err(error) => panic!("{error}"),
    };
    match config.engine {
        Engine::Threads => {
            let threads = ThreadsConfig {
                ranks: config.mesh.ranks(),
                timeout: config.timeout,
            };
            Ok(threads::launch(&threads, on_rank)?)
        }
        #[cfg(feature = "mpi")]
        Engine::Mpi => {
            let mpi = mpi::MpiConfig {
                timeout: config.timeout,
            };
            Ok(vec![mpi::launch(&mpi, on_rank)?])
        }
        #[cfg(feature = "nccl")]
        Engine::Nccl => {
            let nccl = nccl::NcclConfig {
                timeout: config.timeout,
                ..Default::default()
            };
            Ok(vec![nccl::launch(&nccl, on_rank)?])
        }
        #[allow(unreachable_patterns, reason = "some engines are not built")]
        engine => Err(Error::NotBuilt { engine }),
    }
}

/// Checks that there can be such a mesh, and returns the ranks that are in this process.
pub(crate) fn check(config: &LaunchConfig) -> Result<Range<usize>, Error> {
    config.mesh.check(config.mesh.ranks())?;
    match config.engine.process()? {
        None => Ok(0..config.mesh.ranks()),
        Some((rank, processes)) if processes == config.mesh.ranks() => Ok(rank..rank + 1),
        Some((_, processes)) => Err(Error::Mesh(MeshError::Processes {
            mesh: config.mesh,
            processes,
        })),
    }
}

/// [`launch`], with a fork of `module` for every rank: the same weights (shared until they change), each with its own
/// autodiff graph. Where ranks are processes, each brings a module, and all get the weights of rank 0's.
///
/// # Errors
/// As [`launch`]; and if ranks bring modules whose parameters have different shapes.
#[track_caller]
pub fn launch_module<M, T, F, D>(config: &LaunchConfig, devices: &D, module: M, body: F) -> Result<Vec<T>, Error>
where
    M: Module,
    D: RankDevices + ?Sized,
    T: Send,
    F: Fn(SpDevice, M) -> T + Send + Sync,
{
    let here = check(config)?;
    initialize(&module);
    let fork = |rank| Mutex::new(Some(module.clone().fork(devices.of_rank(rank))));
    let forks: Vec<_> = here.clone().map(fork).collect();
    // Its weights live on in the forks, and only there once those have changed.
    drop(module);
    let site = Site::here();
    launch(config, devices, |device| {
        let fork = forks[device.rank() - here.start]
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .take();
        let fork = fork.expect("each rank takes its own fork once");
        let module = match config.engine {
            Engine::Threads => fork,
            _ => of_first(fork, device.mesh().world().as_ref(), site),
        };
        body(device, module)
    })
}

/// Draws every parameter of a module now. Burn draws a parameter when it is first used, which ranks would do in any
/// order and from a generator that they share; drawn now, the values depend on the device's seed and nothing else.
pub fn initialize<M: Module>(module: &M) {
    struct Draw;

    impl ModuleVisitor for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let _ = param.val();
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            let _ = param.val();
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            let _ = param.val();
        }
    }

    module.visit(&mut Draw);
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::nn::LinearConfig;

    use super::*;

    /// The devices go round, and so do the forks of a module.
    #[test]
    fn ranks_take_the_devices_in_turn() {
        let (plain, autodiff) = (Device::flex(), Device::flex().autodiff());
        let devices = vec![plain.clone(), autodiff];
        let config = LaunchConfig::new(MeshShape::ulysses(5));
        let module = LinearConfig::new(2, 3).init(&plain);
        let found = launch_module(&config, &devices, module, |device, _| device.device().is_autodiff());
        assert_eq!(found.unwrap(), [false, true, false, true, false]);
    }

    #[test]
    fn no_device_is_refused() {
        let config = LaunchConfig::new(MeshShape::ulysses(2));
        let error = launch(&config, &Vec::new(), |_| ()).unwrap_err().to_string();
        assert!(error.contains("the list of devices is empty"), "{error}");
    }
}
