use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_sp_comm::Buffer;
use kernels_cubecl::Kernels;

/// What a backend supplies beside its [`Kernels`]: a way from its tensors to the buffers that engines move, and back.
///
/// Both directions share storage where the backend allows it, and keep shape and dtype; none of them is differentiable.
pub trait SpBackend: Kernels {
    /// Whether its tensors lie in the host's memory anyway.
    const IN_HOST_MEMORY: bool;

    /// Of a matrix product, the most rows that are computed at once.
    const ROWS_AT_ONCE: usize;

    /// The buffer of a float tensor.
    fn float_into_buffer(tensor: FloatTensor<Self>) -> Buffer;
    /// The float tensor of a buffer.
    fn float_from_buffer(buffer: Buffer, device: &Device<Self>) -> FloatTensor<Self>;
    /// The buffer of an int tensor.
    fn int_into_buffer(tensor: IntTensor<Self>) -> Buffer;
    /// The int tensor of a buffer.
    fn int_from_buffer(buffer: Buffer, device: &Device<Self>) -> IntTensor<Self>;
    /// The buffer of a bool tensor.
    fn bool_into_buffer(tensor: BoolTensor<Self>) -> Buffer;
    /// The bool tensor of a buffer.
    fn bool_from_buffer(buffer: Buffer, device: &Device<Self>) -> BoolTensor<Self>;
}
