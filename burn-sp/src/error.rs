use burn_sp_comm::CommError;

use crate::layout::MeshError;

/// Why a launch failed: the same report on every rank.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The mesh cannot be made; no rank has started.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A rank panicked, came late, or called another collective than its peers.
    #[error(transparent)]
    Comm(#[from] CommError),
}
