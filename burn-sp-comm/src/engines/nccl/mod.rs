//! Ranks as processes with a CUDA device each, on any number of hosts, over NCCL.
//!
//! Start a program once a rank, by `mpirun`, by `srun`, by PyTorch's launcher, or by hand with the variables that the
//! latter sets:
//!
//! ```text
//! RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29517 PROGRAM   # on node1
//! RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29517 PROGRAM   # on node2
//! ```
//!
//! A rank takes the device of its local rank. The libraries of CUDA and NCCL (2.18 or newer) are loaded when the program
//! runs; nothing of them is needed to build it.
//!
//! The library works on the tensors' own memory, on the stream on which the device works for the rank: the host waits
//! for nothing, apart from the shape of a tensor that another rank hands over (shift, broadcast), from the founding of a
//! group's communicator at its first collective, and from barriers. Tensors in host memory, which should be small, go by
//! way of the device, and the host waits for them.
//!
//! Ranks that share several groups must call these groups' collectives in one order, as a device works them off in the
//! order in which they come. What ranks call is compared by the hub, beside the device's work: a mismatch, a rank that is
//! late and a process that has died end the communicators, and with them whatever is stuck on a device.
//!
//! **No GPU has run this engine yet.** It is type-checked, and all of it that needs no device is tested: the rendezvous,
//! the variables, what NCCL is asked for in each collective (played on host memory), and the refusals.

#[cfg(test)]
mod alone;
mod calls;
mod device;
mod library;
mod link;
#[cfg(test)]
mod simulation;
mod watch;
mod world;

use super::processes::{Address, Door, Environment, Hub, ProcessWorld, Reported, find, report_on, run};
use super::shared::seat::Seat;
use super::shared::{deadline, panics};
use crate::{CommError, Communicator, CudaOrder};
use std::sync::Arc;
use std::time::Duration;
use world::{Group, Known, World};

/// The variable that overrides [`NcclConfig::order`]: `on-stream` or `host-synced`.
pub const ORDER_VARIABLE: &str = "BURN_SP_NCCL";

/// How to run ranks as processes over NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclConfig {
    /// How long a rank waits inside one collective, and for the others at the start, before the whole world fails.
    pub timeout: Duration,
    /// How collectives are put in order with the device's other work; [`ORDER_VARIABLE`] overrides it.
    pub order: CudaOrder,
}

impl Default for NcclConfig {
    /// 60 seconds, [`CudaOrder::OnStream`].
    fn default() -> Self {
        NcclConfig {
            timeout: Duration::from_secs(60),
            order: CudaOrder::default(),
        }
    }
}

/// This process's rank, and how many there are, as the environment has it.
///
/// # Errors
/// [`CommError::Invalid`] if a variable is missing or unusable.
pub fn rank_and_size() -> Result<(usize, usize), CommError> {
    let environment = Environment::of_process()?;
    Ok((environment.rank, environment.size))
}

/// How many CUDA devices this process sees: as many ranks can be on this host.
///
/// # Errors
/// [`CommError::Invalid`] if CUDA or NCCL cannot be loaded.
pub fn devices() -> Result<usize, CommError> {
    library::check()?;
    library::devices()
}

/// The number of the CUDA device that this process's tensors must be on: that of its local rank, or the only one where
/// `CUDA_VISIBLE_DEVICES` gives the process one of its own.
///
/// # Errors
/// [`CommError::Invalid`] if there is no such device, or CUDA or NCCL cannot be loaded, or the environment is unusable.
pub fn device() -> Result<usize, CommError> {
    let environment = Environment::of_process()?;
    library::check()?;
    library::device_of(&environment)
}

/// Runs `body` as this process's rank, and returns its result when the code of all ranks has ended.
///
/// Every process of the run must call it. A process may call it again afterwards, if all do. Tensors must be on the
/// device of [`device`], or in host memory.
///
/// The process gets handlers for SIGTERM and SIGINT, unless it has its own, which print what the rank was doing before it ends: launchers end
/// the survivors so when a rank has died.
///
/// # Errors
/// [`CommError::Invalid`], before anything has started: what is missing or unusable. If any rank fails, the first
/// failure, the same on every rank: see [`threads::launch`](super::threads::launch); and [`CommError::Died`] for a
/// process that ended without a word. The program should then end, with a code other than 0. A rank whose code goes on
/// for long after the failure of another has its process ended.
pub fn launch<T>(config: &NcclConfig, body: impl FnOnce(Arc<dyn Communicator>) -> T) -> Result<T, CommError> {
    let variable = std::env::var_os(ORDER_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    let order = order(config.order, variable.as_deref())?;
    let environment = Environment::of_process()?;
    library::check()?;
    let number = library::device_of(&environment)?;
    let Environment { rank, size, .. } = environment;

    report_on(Reported::Starting { rank: Some(rank) })
        .map_err(|error| CommError::failed(rank, format!("its signal handler: {error}")))?;
    let met = meet(&environment, config.timeout)?;
    run(rank, size, config.timeout, met, |control| {
        let everyone = Group::everyone(size, 0, Known::default());
        let world = World::new(control.clone(), number, order, &everyone)?;
        let comm: Arc<dyn Communicator> = Arc::new(Seat::new(world.clone(), everyone, rank));
        let result = panics::caught(rank, || body(comm))?;
        // Others may still be waiting for what this rank's device sends.
        world.watch.idle()?;
        control.announce_end(world.groups().called());
        control.await_all()?;
        // After a failure it ends by itself.
        world.end();
        Ok(result)
    })
}

/// Opens the hub on rank 0, and learns where it is on the others.
fn meet(environment: &Environment, timeout: Duration) -> Result<(Option<Hub>, Address), CommError> {
    let deadline = deadline(timeout);
    if environment.rank != 0 {
        return Ok((None, find(environment, deadline)?));
    }
    let mut others = Door::open(environment)?.gather(deadline)?;
    match Hub::start(environment.size, timeout) {
        Ok((hub, address)) => {
            others.welcome(&address)?;
            Ok((Some(hub), address))
        }
        Err(error) => {
            let fault = format!("no port can be opened: {error}");
            others.refuse(&fault);
            Err(CommError::failed(0, fault))
        }
    }
}

/// The order that is configured, unless the variable says otherwise.
fn order(configured: CudaOrder, variable: Option<&str>) -> Result<CudaOrder, CommError> {
    match variable {
        None => Ok(configured),
        Some("on-stream") => Ok(CudaOrder::OnStream),
        Some("host-synced") => Ok(CudaOrder::HostSynced),
        Some(other) => Err(CommError::invalid(format!(
            "{ORDER_VARIABLE} is {other:?}: it should be on-stream or host-synced"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_overrides_the_order() {
        use CudaOrder::{HostSynced, OnStream};
        assert_eq!(order(OnStream, None), Ok(OnStream));
        assert_eq!(order(HostSynced, None), Ok(HostSynced));
        assert_eq!(order(OnStream, Some("host-synced")), Ok(HostSynced));
        assert_eq!(order(HostSynced, Some("on-stream")), Ok(OnStream));
        let error = order(OnStream, Some("fast")).unwrap_err().to_string();
        assert_eq!(error, "BURN_SP_NCCL is \"fast\": it should be on-stream or host-synced");
    }
}
