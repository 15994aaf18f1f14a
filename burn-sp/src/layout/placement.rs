use std::fmt;

/// How a tensor lies on one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Each rank holds its own slice along a dimension.
    Shard(usize),
    /// Every rank holds the whole value.
    Replicate,
    /// Each rank holds a term; the value is the sum over the ranks.
    Partial,
}

impl Placement {
    /// The placement of the gradient. A replicated value's gradient is partial, because every rank used the value for
    /// something else; a partial value's gradient is replicated.
    pub fn dual(self) -> Placement {
        match self {
            Placement::Shard(dim) => Placement::Shard(dim),
            Placement::Replicate => Placement::Partial,
            Placement::Partial => Placement::Replicate,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Shard(dim) => write!(f, "Shard({dim})"),
            Placement::Replicate => f.write_str("Replicate"),
            Placement::Partial => f.write_str("Partial"),
        }
    }
}
