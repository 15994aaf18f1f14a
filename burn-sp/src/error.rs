use burn_sp_comm::CommError;

use crate::Engine;
use crate::layout::MeshError;

/// Why a launch failed: the same report on every rank.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The mesh cannot be made; no rank has started.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The program was built without the engine that it was to use.
    #[error("engine {engine}: this program was built without it; build it with the feature `{engine}`, or use threads")]
    NotBuilt {
        /// The engine.
        engine: Engine,
    },
    /// A rank panicked, came late, or called another collective than its peers.
    #[error(transparent)]
    Comm(#[from] CommError),
}
