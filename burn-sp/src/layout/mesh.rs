use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

use burn_sp_comm::{CommError, Communicator};
use serde::{Deserialize, Serialize};

use super::Axis;

/// How many ranks each axis has; the product is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeshShape {
    /// Ranks on the data-parallel axis.
    pub dp: usize,
    /// Ranks on the ring axis.
    pub ring: usize,
    /// Ranks on the ulysses axis.
    pub ulysses: usize,
    /// Ranks on the tensor-parallel axis.
    pub tp: usize,
}

impl Default for MeshShape {
    fn default() -> Self {
        Self {
            dp: 1,
            ring: 1,
            ulysses: 1,
            tp: 1,
        }
    }
}

impl MeshShape {
    /// A mesh with `ranks` ranks on the ulysses axis.
    pub fn ulysses(ranks: usize) -> Self {
        Self {
            ulysses: ranks,
            ..Self::default()
        }
    }

    /// A mesh with `ranks` ranks on the ring axis.
    pub fn ring(ranks: usize) -> Self {
        Self {
            ring: ranks,
            ..Self::default()
        }
    }

    /// A mesh with `ranks` ranks on the tensor-parallel axis.
    pub fn tp(ranks: usize) -> Self {
        Self {
            tp: ranks,
            ..Self::default()
        }
    }

    /// The same mesh with `ranks` data-parallel ranks.
    pub fn with_dp(self, ranks: usize) -> Self {
        Self { dp: ranks, ..self }
    }

    /// The same mesh with `ranks` ranks on the ring axis.
    pub fn with_ring(self, ranks: usize) -> Self {
        Self { ring: ranks, ..self }
    }

    /// The same mesh with `ranks` ranks on the ulysses axis.
    pub fn with_ulysses(self, ranks: usize) -> Self {
        Self { ulysses: ranks, ..self }
    }

    /// The same mesh with `ranks` ranks on the tensor-parallel axis.
    pub fn with_tp(self, ranks: usize) -> Self {
        Self { tp: ranks, ..self }
    }

    /// Ranks on an axis.
    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Dp => self.dp,
            Axis::Ring => self.ring,
            Axis::Ulysses => self.ulysses,
            Axis::Tp => self.tp,
        }
    }

    /// All ranks.
    pub fn ranks(&self) -> usize {
        Axis::ALL.iter().map(|axis| self.size(*axis)).product()
    }

    /// Checks that the mesh can be made from `ranks` ranks.
    ///
    /// # Errors
    /// If an axis has no ranks, or the product of the axes is another number.
    pub fn check(&self, ranks: usize) -> Result<(), MeshError> {
        match Axis::ALL.into_iter().find(|axis| self.size(*axis) == 0) {
            Some(axis) => Err(MeshError::Empty { axis }),
            None if self.ranks() != ranks => Err(MeshError::Product { mesh: *self, ranks }),
            None => Ok(()),
        }
    }

    /// Whether every rank owns a token of a sequence of so many, as it does exactly if there are as many as ranks that
    /// share the sequence. `ring` splits it contiguous or zigzag, `ulysses` a rank's share of that, and `tp` a share of
    /// that.
    pub fn fits(&self, tokens: usize) -> bool {
        tokens >= self.with_dp(1).ranks()
    }

    /// The coordinate of a rank on an axis: `tp` varies fastest, `dp` slowest.
    fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        let inner: usize = Axis::ALL
            .iter()
            .filter(|other| **other > axis)
            .map(|other| self.size(*other))
            .product();
        rank / inner % self.size(axis)
    }
}

impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names = Axis::ALL.iter().filter(|axis| self.size(**axis) > 1).peekable();
        if names.peek().is_none() {
            return f.write_str("one rank");
        }
        for (index, axis) in names.enumerate() {
            write!(f, "{}{axis} {}", if index > 0 { " x " } else { "" }, self.size(*axis))?;
        }
        Ok(())
    }
}

/// A mesh that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis has no ranks.
    #[error("mesh: {axis} is 0; leave the axis out or give it at least 1 rank")]
    Empty {
        /// The axis.
        axis: Axis,
    },
    /// The axes multiply to another number of ranks.
    #[error("mesh: {mesh} needs {} ranks, but {ranks} were given; make the product of the axes equal the ranks", .mesh.ranks())]
    Product {
        /// What was asked for.
        mesh: MeshShape,
        /// How many ranks there are.
        ranks: usize,
    },
    /// The axes multiply to another number than there are processes.
    #[error("mesh: {mesh} needs {} processes, but {processes} {} started; start {}, with mpirun: -n {}",
        .mesh.ranks(), if *.processes == 1 { "was" } else { "were" }, .mesh.ranks(), .mesh.ranks())]
    Processes {
        /// What was asked for.
        mesh: MeshShape,
        /// How many processes were started.
        processes: usize,
    },
}

/// The ranks arranged on named axes, as one rank sees them: its coordinates and its process groups.
pub struct Mesh {
    shape: MeshShape,
    world: Arc<dyn Communicator>,
    groups: Mutex<HashMap<Vec<Axis>, Arc<dyn Communicator>>>,
}

impl Mesh {
    /// Arranges the ranks of `world`. Collective: every rank of `world` must call it.
    ///
    /// # Errors
    /// If the product of the axes is not the size of `world`, or a rank fails meanwhile.
    pub fn new(shape: MeshShape, world: Arc<dyn Communicator>) -> Result<Self, crate::Error> {
        shape.check(world.size())?;
        Ok(Self {
            shape,
            world,
            groups: Mutex::default(),
        })
    }

    /// Ranks on each axis.
    pub fn shape(&self) -> MeshShape {
        self.shape
    }

    /// This rank, counted over the whole mesh.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Ranks on an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.shape.size(axis)
    }

    /// This rank's coordinate on an axis.
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.shape.coordinate(self.rank(), axis)
    }

    /// All ranks as one group.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// The group of ranks that differ from this one on the given axes only, ordered by rank.
    ///
    /// The group is made at the first call, so every member has to ask for its groups in the same order.
    ///
    /// # Errors
    /// If a rank fails meanwhile, or the members ask in different orders.
    pub fn group(&self, axes: &[Axis]) -> Result<Arc<dyn Communicator>, CommError> {
        let axes: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| axes.contains(axis)).collect();
        let mut groups = self.groups.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(group) = groups.get(&axes) {
            return Ok(group.clone());
        }
        let same = |rank: usize, axis: &Axis| {
            axes.contains(axis) || self.shape.coordinate(rank, *axis) == self.coordinate(*axis)
        };
        let members: Vec<usize> = (0..self.world.size())
            .filter(|rank| Axis::ALL.iter().all(|axis| same(*rank, axis)))
            .map(|rank| self.world.ranks()[rank])
            .collect();
        let name = axes.iter().map(|axis| axis.name()).collect::<Vec<_>>().join("+");
        let group = self.world.subgroup(&members, &name)?;
        groups.insert(axes, group.clone());
        Ok(group)
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mesh({}, rank {})", self.shape, self.rank())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Split;

    #[test]
    fn tp_varies_fastest() {
        let shape = MeshShape {
            dp: 2,
            ring: 1,
            ulysses: 2,
            tp: 3,
        };
        let all: Vec<_> = (0..12)
            .map(|rank| [Axis::Dp, Axis::Ulysses, Axis::Tp].map(|axis| shape.coordinate(rank, axis)))
            .collect();
        assert_eq!(all[0], [0, 0, 0]);
        assert_eq!(all[1], [0, 0, 1]);
        assert_eq!(all[3], [0, 1, 0]);
        assert_eq!(all[11], [1, 1, 2]);
    }

    #[test]
    fn a_mesh_fits_if_every_rank_has_a_token() {
        for tokens in 0..=40 {
            for (split, ring) in [Split::Contiguous, Split::Zigzag]
                .iter()
                .flat_map(|split| (1..=5).map(move |ring| (split, ring)))
            {
                for (ulysses, tp) in (1..=4).flat_map(|ulysses| (1..=3).map(move |tp| (ulysses, tp))) {
                    let mesh = MeshShape::ring(ring).with_ulysses(ulysses).with_tp(tp).with_dp(2);
                    let rings = split.parts(tokens, ring);
                    let fewest = (0..ring).map(|rank| rings.len_of(rank) / ulysses / tp).min();
                    assert_eq!(mesh.fits(tokens), fewest > Some(0), "{tokens} on {mesh}, {split}");
                }
            }
        }
    }

    #[test]
    fn a_mesh_of_the_wrong_size_says_what_would_work() {
        let error = MeshShape::ulysses(4).check(3).unwrap_err().to_string();
        assert_eq!(
            error,
            "mesh: ulysses 4 needs 4 ranks, but 3 were given; make the product of the axes equal the ranks"
        );
        assert!(MeshShape::tp(0).check(1).unwrap_err().to_string().contains("tp is 0"));
    }
}
