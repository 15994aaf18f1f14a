//! Who holds what: mesh axes, placements, splits and layouts. Plain values, no tensors.

mod axis;
mod choice;
mod mesh;
mod placement;
mod split;
mod tensor_layout;
mod window;

pub use axis::Axis;
pub use choice::{AttentionWorkload, Links, MeshChoice};
pub use mesh::{Mesh, MeshError, MeshShape};
pub use placement::Placement;
pub use split::Split;
pub use tensor_layout::Layout;
pub use window::Window;
