//! A communicator of NCCL.
//!
//! All are non-blocking: the library's calls return at once and are waited for by asking, so that whoever waits sees the
//! world fail, and whoever ends the communicator finds its lock free.

use super::library::words;
use crate::CommError;
use crate::engines::processes::Control;
use crate::engines::shared::lock;
use cudarc::nccl::sys::{self, ncclComm, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use std::ffi::{c_char, c_int, c_uint};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long whoever waits for the library sleeps between two looks.
const NAP: Duration = Duration::from_micros(100);

/// A group's communicator, as this rank has it.
pub struct Link {
    control: Arc<Control>,
    /// None once it has been ended.
    comm: Mutex<Option<Handle>>,
}

struct Handle(ncclComm_t);

// SAFETY: the library allows any thread, one at a time: the lock sees to it.
unsafe impl Send for Handle {}

/// What the library is doing with a communicator.
enum State {
    Settled,
    Busy,
    Fault(String),
    Ended,
}

/// What NCCL 2.18 knows of `ncclConfig_t`. Later versions fill in for what they know besides.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Of a later version: here, so that it is not padding without a value.
    traffic_class: c_int,
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER`, but non-blocking.
    fn new() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

/// An identifier for a communicator that is to be.
pub fn unique_id() -> Result<Vec<u8>, String> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: writes the identifier.
    match unsafe { sys::ncclGetUniqueId(&mut id) } {
        ncclResult_t::ncclSuccess => Ok(id.internal.iter().map(|byte| *byte as u8).collect()),
        fault => Err(words(fault, None)),
    }
}

impl Link {
    /// The communicator with this identifier, of which this process is `rank` of `size`. Waits until all are there.
    ///
    /// The calling thread's CUDA context must be that of the rank's device.
    pub fn join(
        control: &Arc<Control>,
        id: &[u8],
        (rank, size): (usize, usize),
        deadline: Instant,
        waiting: impl FnOnce() -> String,
    ) -> Result<Arc<Link>, CommError> {
        let failed = |what: String| control.fail(CommError::failed(control.rank(), what));
        let mut unique = ncclUniqueId { internal: [0; 128] };
        if id.len() != unique.internal.len() {
            return Err(failed(format!("NCCL: an identifier of {} bytes", id.len())));
        }
        unique
            .internal
            .iter_mut()
            .zip(id)
            .for_each(|(to, from)| *to = *from as c_char);
        let mut config = Config::new();
        let slot = slot();
        // SAFETY: the library reads as much of the configuration as its size says, and writes the communicator to the
        // slot, which lives for ever.
        let result = unsafe {
            sys::ncclCommInitRankConfig(
                slot.as_ptr(),
                size as c_int,
                unique,
                rank as c_int,
                (&raw mut config).cast::<ncclConfig_t>(),
            )
        };
        fine(result).map_err(|fault| failed(words(fault, None)))?;
        Self::adopt(control, slot, deadline, waiting)
    }

    /// The same members in another order: of which this one is `rank`. Waits until all have asked for it.
    ///
    /// Nothing may be under way on this communicator.
    pub fn split(&self, rank: usize, deadline: Instant, waiting: impl Fn() -> String) -> Result<Arc<Link>, CommError> {
        let slot = slot();
        let asked = {
            let comm = lock(&self.comm);
            let Some(Handle(comm)) = *comm else {
                return Err(self.ended());
            };
            // SAFETY: the communicator is alive, and the slot lives for ever. Without a configuration of its own the new
            // one takes over that of the old one.
            let result = unsafe { sys::ncclCommSplit(comm, 0, rank as c_int, slot.as_ptr(), null_mut()) };
            fine(result).map_err(|fault| words(fault, Some(comm)))
        };
        asked.map_err(|fault| self.failed(fault))?;
        // The old one is busy until the new one is there.
        self.settle(deadline, &waiting)?;
        Self::adopt(&self.control, slot, deadline, waiting)
    }

    fn adopt(
        control: &Arc<Control>,
        slot: &AtomicPtr<ncclComm>,
        deadline: Instant,
        waiting: impl FnOnce() -> String,
    ) -> Result<Arc<Link>, CommError> {
        let comm = slot.load(Ordering::Acquire);
        if comm.is_null() {
            let fault = CommError::failed(control.rank(), "NCCL made no communicator");
            return Err(control.fail(fault));
        }
        let link = Arc::new(Link {
            control: control.clone(),
            comm: Mutex::new(Some(Handle(comm))),
        });
        let weak = Arc::downgrade(&link);
        control.on_failure(move || {
            // Ending one may take a while, so not here.
            let end = move || weak.upgrade().iter().for_each(|link| link.end());
            if let Err(error) = std::thread::Builder::new().name("end of nccl".into()).spawn(end) {
                tracing::warn!(%error, "an NCCL communicator is left as it is");
            }
        });
        link.settle(deadline, waiting)?;
        Ok(link)
    }

    /// Makes calls of the library as one group, and waits until they are on their streams.
    ///
    /// The calling thread's CUDA context must be that of the rank's device.
    pub fn group(
        &self,
        calls: impl FnOnce(ncclComm_t) -> Result<(), ncclResult_t>,
        deadline: Instant,
        waiting: impl FnOnce() -> String,
    ) -> Result<(), CommError> {
        let made = {
            let comm = lock(&self.comm);
            let Some(Handle(comm)) = *comm else {
                return Err(self.ended());
            };
            // SAFETY: the group is this thread's, and ends here.
            let begun = fine(unsafe { sys::ncclGroupStart() });
            let made = begun.and_then(|()| calls(comm));
            // SAFETY: as above. Also after a fault, or the thread would stay inside the group.
            let ended = fine(unsafe { sys::ncclGroupEnd() });
            made.and(ended).map_err(|fault| words(fault, Some(comm)))
        };
        made.map_err(|fault| self.failed(fault))?;
        self.settle(deadline, waiting)
    }

    /// What the library has noticed on its own, if anything.
    pub fn fault(&self) -> Option<String> {
        match self.state() {
            State::Fault(fault) => Some(fault),
            State::Settled | State::Busy | State::Ended => None,
        }
    }

    /// Ends the communicator: what is under way on the device comes to an end, and its results are worth nothing.
    ///
    /// Also in order once nothing is under way. Unlike `ncclCommDestroy` it waits for no other rank.
    pub fn end(&self) {
        // Taken out first, so that nobody waits for the lock while it ends.
        let taken = lock(&self.comm).take();
        if let Some(Handle(comm)) = taken {
            // SAFETY: it is alive, and no one finds it any more.
            if let Err(fault) = fine(unsafe { sys::ncclCommAbort(comm) }) {
                tracing::debug!(fault = words(fault, None), "an NCCL communicator did not end well");
            }
        }
    }

    fn state(&self) -> State {
        let comm = lock(&self.comm);
        let Some(Handle(comm)) = *comm else { return State::Ended };
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive, and the state is written.
        let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
        match (asked, state) {
            (ncclResult_t::ncclSuccess, ncclResult_t::ncclSuccess) => State::Settled,
            (ncclResult_t::ncclSuccess, ncclResult_t::ncclInProgress) => State::Busy,
            (ncclResult_t::ncclSuccess, fault) | (fault, _) => State::Fault(words(fault, Some(comm))),
        }
    }

    /// Waits until the library has done what it was asked for.
    fn settle(&self, deadline: Instant, waiting: impl FnOnce() -> String) -> Result<(), CommError> {
        loop {
            match self.state() {
                State::Settled => return Ok(()),
                State::Fault(fault) => return Err(self.failed(fault)),
                State::Ended => return Err(self.ended()),
                State::Busy if Instant::now() >= deadline => return Err(self.control.late(waiting())),
                State::Busy => std::thread::sleep(NAP),
            }
        }
    }

    fn failed(&self, fault: String) -> CommError {
        self.control.fail(CommError::failed(self.control.rank(), fault))
    }

    /// It ends when the world fails, or with the launch.
    fn ended(&self) -> CommError {
        self.failed("the NCCL communicator has been ended".into())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end();
    }
}

/// Where the library writes a communicator: perhaps later than anyone waits for it, so this is never freed.
fn slot() -> &'static AtomicPtr<ncclComm> {
    Box::leak(Box::new(AtomicPtr::new(null_mut())))
}

/// A non-blocking call that has been accepted.
pub fn fine(result: ncclResult_t) -> Result<(), ncclResult_t> {
    match result {
        ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
        fault => Err(fault),
    }
}
