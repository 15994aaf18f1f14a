//! Ranks as processes, on any number of hosts, over the system's MPI library.
//!
//! Start a program with the launcher of that library, one process a rank:
//!
//! ```text
//! mpirun -n 4 PROGRAM
//! ```
//!
//! Tensors are sent from where they lie and received where the result is to be; only the terms of sums are received
//! beside it. Sums are taken in rank order, so they have the bits of the [`threads`](super::threads) engine. One thread
//! a process makes all calls of the library, so collectives that were started move on while ranks
//! compute.
//!
//! Tensors on a device go through host memory: the backend's own, pinned where it has such.

mod area;
mod call;
mod groups;
mod header;
mod library;
mod posting;
mod progress;
mod tags;
mod world;

use super::processes::{Address, Control, Hub, ProcessWorld, Reported, report_on, run};
use super::shared::seat::Seat;
use super::shared::{lock, panics, text};
use crate::{CommError, Communicator};
use library::Library;
use progress::{Command, Engine, SHARED};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use world::{World, everyone};

/// How to run ranks as processes over MPI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpiConfig {
    /// How long a rank waits inside one collective, and for the others at the start, before the whole world fails.
    pub timeout: Duration,
}

impl Default for MpiConfig {
    /// 60 seconds.
    fn default() -> Self {
        MpiConfig {
            timeout: Duration::from_secs(60),
        }
    }
}

/// This process's rank, and how many there are, as the launcher of the processes has it. Initialises MPI.
///
/// # Errors
/// If MPI cannot be initialised.
pub fn rank_and_size() -> Result<(usize, usize), CommError> {
    let engine = engine()?;
    Ok((engine.rank, engine.size))
}

/// Runs `body` as this process's rank, and returns its result when the code of all ranks has ended.
///
/// Every process of the run must call it. A process may call it again afterwards, if all do.
///
/// The process gets handlers for SIGTERM and SIGINT, unless it has its own, which print what the rank was doing before
/// it ends: launchers end the survivors so when a rank has died.
///
/// # Errors
/// If any rank fails, the first failure, the same on every rank: see [`threads::launch`](super::threads::launch); and
/// [`CommError::Died`] for a process that ended without a word. The program should then end, with a code other than 0.
/// A rank whose code goes on for long after the failure of another has its process ended.
pub fn launch<T>(config: &MpiConfig, body: impl FnOnce(Arc<dyn Communicator>) -> T) -> Result<T, CommError> {
    let engine = engine()?;
    let (rank, size) = (engine.rank, engine.size);
    let launches = engine.launches.fetch_add(1, Ordering::Relaxed);
    // Until this launch has ended well, MPI is in no state to be ended in good order, or to begin another.
    if !ENDED_WELL.swap(false, Ordering::Relaxed) && launches > 0 {
        return Err(CommError::invalid(format!(
            "rank {rank}: mpi: an earlier launch of this process has failed or has not ended; end the process"
        )));
    }
    let met = engine.meet(config.timeout)?;
    let outcome = run(rank, size, config.timeout, met, |control| {
        *lock(&PRESENT) = Some(control.clone());
        engine.tell(Command::Launch(control.clone()))?;
        let everyone = everyone(size, launches);
        let world = World::new(control.clone(), engine.commands(), &everyone);
        let comm: Arc<dyn Communicator> = Arc::new(Seat::new(world.clone(), everyone, rank));
        let result = panics::caught(rank, || body(comm))?;
        control.announce_end(world.groups().called());
        let (reply, drained) = channel();
        world.tell(Command::Drain(reply))?;
        while drained.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
            if let Some(error) = control.failure() {
                return Err(error);
            }
        }
        control.await_all().map(|()| result)
    });
    ENDED_WELL.store(outcome.is_ok(), Ordering::Relaxed);
    outcome
}

/// How long processes may take until all of them have started; the library itself would wait for ever.
const INITIALISED: Duration = Duration::from_secs(300);

/// How long it waits before it looks whether the world has failed.
const LONG: Duration = Duration::from_millis(100);

/// The line to the hub of the present launch, or of the latest.
static PRESENT: Mutex<Option<Arc<Control>>> = Mutex::new(None);

/// Whether the latest launch has. A process that ends otherwise leaves MPI as it is, upon which the launcher ends the
/// others: to end MPI in good order would be to wait for them.
static ENDED_WELL: AtomicBool = AtomicBool::new(false);

/// The way to the engine's thread of this process.
struct Handle {
    rank: usize,
    size: usize,
    commands: Mutex<Sender<Command>>,
    /// How many launches there were: the same on all ranks.
    launches: AtomicU64,
}

/// The engine of this process, once it is asked for.
static ENGINE: OnceLock<Result<Handle, CommError>> = OnceLock::new();

/// Starts the engine's thread, once a process.
fn engine() -> Result<&'static Handle, CommError> {
    let start = || {
        // MPI tells a process its rank when all have started; most launchers say so before.
        let variable = |name: &str| std::env::var(name).ok()?.parse().ok();
        let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]
            .into_iter()
            .find_map(variable);
        report_on(Reported::Starting { rank })
            .map_err(|error| CommError::invalid(format!("mpi: its signal handler: {error}")))?;
        let (commands, inbox) = channel();
        let (ready, started) = channel();
        let run = move || {
            let library = match Library::start() {
                Ok(library) => library,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let (rank, size) = (library.rank, library.size);
            // MPI may write to what it holds for as long as the process lives.
            let mut engine = ManuallyDrop::new(Engine::new(library, inbox));
            // Whoever started it waits for this.
            let _ = ready.send(Ok((rank, size)));
            if catch_unwind(AssertUnwindSafe(|| engine.run())).is_err()
                && let Some(control) = lock(&PRESENT).clone()
            {
                control.fail(CommError::failed(rank, "the thread of the MPI engine panicked"));
            }
        };
        std::thread::Builder::new()
            .name("mpi".into())
            .spawn(run)
            .map_err(|error| CommError::invalid(format!("mpi: its thread cannot be started: {error}")))?;
        let (rank, size) = started.recv_timeout(INITIALISED).map_err(|error| match error {
            RecvTimeoutError::Timeout => CommError::invalid(format!(
                "mpi: not all processes came to MPI_Init within {}",
                text(INITIALISED)
            )),
            RecvTimeoutError::Disconnected => CommError::invalid("mpi: the library could not be initialised"),
        })??;
        // SAFETY: the function lives as long as the program.
        unsafe { atexit(end_mpi) };
        Ok(Handle {
            rank,
            size,
            commands: Mutex::new(commands),
            launches: AtomicU64::new(0),
        })
    };
    ENGINE.get_or_init(start).as_ref().map_err(CommError::clone)
}

unsafe extern "C" {
    fn atexit(then: extern "C" fn()) -> std::ffi::c_int;
}

/// Ends MPI when the process does.
extern "C" fn end_mpi() {
    let Some(Ok(handle)) = ENGINE.get() else { return };
    if !ENDED_WELL.load(Ordering::Relaxed) {
        return;
    }
    let (done, ended) = channel();
    if handle.tell(Command::Stop(done)).is_ok() {
        // Waits for the other processes, as MPI demands.
        let _ = ended.recv();
    }
}

impl Handle {
    fn commands(&self) -> Sender<Command> {
        lock(&self.commands).clone()
    }

    fn tell(&self, command: Command) -> Result<(), CommError> {
        self.commands()
            .send(command)
            .map_err(|_| CommError::failed(self.rank, "the thread of the MPI engine has ended"))
    }

    /// Opens the hub on rank 0, and tells every rank where it is.
    fn meet(&self, timeout: Duration) -> Result<(Option<Hub>, Address), CommError> {
        let failed = |what: String| CommError::failed(self.rank, what);
        let opened = match self.rank {
            0 => Some(
                Hub::start(self.size, timeout).map_err(|error| failed(format!("no port can be opened: {error}")))?,
            ),
            _ => None,
        };
        let (hub, bytes) = match opened {
            Some((hub, mut address)) => {
                // As many as fit; a host has few.
                let bytes = loop {
                    let bytes = postcard::to_stdvec(&address).map_err(|error| failed(error.to_string()))?;
                    match bytes.len() <= SHARED {
                        true => break bytes,
                        false => address.addresses.truncate(address.addresses.len() / 2),
                    }
                };
                (Some(hub), bytes)
            }
            None => (None, Vec::new()),
        };
        let (reply, shared) = channel();
        self.tell(Command::Share { bytes, reply })?;
        let bytes = shared.recv_timeout(timeout).map_err(|_| CommError::Timeout {
            report: format!("rank {} waited {timeout:?} for the other processes to start", self.rank),
        })?;
        let bytes = bytes.map_err(failed)?;
        let address = postcard::from_bytes(&bytes).map_err(|error| failed(format!("rank 0's address: {error}")))?;
        Ok((hub, address))
    }
}
