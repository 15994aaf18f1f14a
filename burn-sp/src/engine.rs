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
            #[cfg(not(feature = "mpi"))]
            Engine::Mpi => Err(Error::NotBuilt { engine: self }),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Threads => "threads",
            Engine::Mpi => "mpi",
        })
    }
}
