//! Which kernels a call runs on.

use std::sync::{Mutex, PoisonError};

use burn_cubecl::tensor::CubeTensor;

use crate::{cube::launch::elem, problem::Problem};

/// Elements of a block of scores of all heads at most: 128 MB of f32.
const BLOCK: usize = 1 << 25;
/// Sides of a block.
const SIDES: [usize; 4] = [1024, 512, 256, 128];

/// How attention is computed on CubeCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionPath {
    /// By kernels that keep small tiles of scores on the chip. For all dtypes and devices.
    Tiles,
    /// By matrix products of blocks, `block` queries by `block` keys of all heads at once, which run on tensor cores where
    /// there are any. Weights enter them rounded to the dtype of the inputs.
    Products {
        /// Queries and keys in a block, a multiple of 32.
        block: usize,
    },
}

static FORCED: Mutex<Option<AttentionPath>> = Mutex::new(None);

impl AttentionPath {
    /// From now on every call in this process goes this way; `None` leaves it to the device again. For comparisons.
    ///
    /// # Panics
    /// If a block is no multiple of 32.
    pub fn force(path: Option<AttentionPath>) {
        if let Some(Self::Products { block }) = path {
            assert!(
                block > 0 && block.is_multiple_of(32),
                "attention: blocks of {block} queries and keys, expected a multiple of 32"
            );
        }
        *FORCED.lock().unwrap_or_else(PoisonError::into_inner) = path;
    }

    /// Products pay where the device has tensor cores for the dtype of the inputs, and the sequence fills a block. (f32 is
    /// not such a dtype: its tensor cores would round to 10 bits.)
    pub(super) fn of(p: &Problem, like: &CubeTensor) -> Self {
        if let Some(forced) = *FORCED.lock().unwrap_or_else(PoisonError::into_inner) {
            return forced;
        }
        let dtype = elem(p.dtype);
        let mut cmma = like.client.properties().features.matmul.cmma.iter();
        let has_cores = cmma.any(|config| config.a_type == dtype && config.b_type == dtype);
        let fits = |side: &usize| p.batch * p.heads * side * side <= BLOCK;
        match SIDES.into_iter().find(fits) {
            Some(block) if has_cores && p.queries.min(p.keys) >= block / 2 && p.head_dim.min(p.value_dim) >= 16 => {
                Self::Products { block }
            }
            _ => Self::Tiles,
        }
    }
}
