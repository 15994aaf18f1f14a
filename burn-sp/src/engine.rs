use std::fmt;

use crate::Error;

/// How ranks run, and how their tensors travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// Threads of this process, on whatever devices it has. Nothing to install.
    #[default]
    Threads,
    /// Processes on any number of hosts, over MPI (feature `mpi`); started by `mpirun` or a cluster's own launcher.
    Mpi,
    /// Processes with a CUDA device each, on any number of hosts, over NCCL (feature `nccl`); started by `mpirun`, a
    /// cluster's own launcher, or the environment variables of PyTorch's. No GPU has run it yet.
    Nccl,
}

impl Engine {
    /// This process's rank, and the number of processes: as many as there are ranks. None where ranks are threads.
    ///
    /// # Errors
    /// If this program was built without the engine, or its library cannot be used.
    pub fn process(self) -> Result<Option<(usize, usize)>, Error> {
        match self {
            Engine::Threads => Ok(None),
            #[cfg(feature = "mpi")]
            Engine::Mpi => Ok(Some(burn_sp_comm::engines::mpi::rank_and_size()?)),
            #[cfg(feature = "nccl")]
            Engine::Nccl => Ok(Some(burn_sp_comm::engines::nccl::rank_and_size()?)),
            #[allow(unreachable_patterns, reason = "some engines are not built")]
            engine => Err(Error::NotBuilt { engine }),
        }
    }

    /// The number of the CUDA device that this process's rank must use; none where any device will do.
    ///
    /// # Errors
    /// As [`process`](Self::process), and if the launcher's variables name no device of this host.
    pub fn cuda_device(self) -> Result<Option<usize>, Error> {
        match self {
            #[cfg(feature = "nccl")]
            Engine::Nccl => Ok(Some(burn_sp_comm::engines::nccl::device()?)),
            #[cfg(not(feature = "nccl"))]
            Engine::Nccl => Err(Error::NotBuilt { engine: self }),
            Engine::Threads | Engine::Mpi => Ok(None),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Threads => "threads",
            Engine::Mpi => "mpi",
            Engine::Nccl => "nccl",
        })
    }
}
