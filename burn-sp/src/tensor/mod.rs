//! Tensors with a layout, and the one differentiable operation that changes it.

mod arithmetic;
mod autodiff;
mod backend;
mod backends;
mod device;
mod kind;
mod ops;
mod product;
mod refusal;
mod sp_tensor;
mod transition;
mod windowed;

pub use backend::SpBackend;
pub use device::{SpDevice, seeded};
pub use kind::SpKind;
pub use ops::SpOps;
pub use refusal::Refusal;
pub use sp_tensor::SpTensor;
pub use windowed::WindowPart;

pub(crate) use kind::{Underway, at, exchange, place, select};
pub(crate) use product::{by_rows, own_storage, product, rows, zeros};
pub(crate) use transition::{Place, Transition};
