//! From the tensors of Burn's dispatch to those that kernels and collectives take, and back. Without the `fusion` feature
//! they are the same.
//!
//! With it, a tensor may be one whose operations are still queued. The way out is `resolve_tensor_*`, which returns a
//! `Result` in Burn 0.23; the way in is what Burn's own `float_from_data` does.

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
#[cfg(feature = "fusion")]
use burn::backend::{
    TensorMetadata,
    fusion::{NoOp, custom::StreamId, get_client},
    ir::{BackendIr, InitOperationIr, OperationIr},
};
#[cfg(feature = "fusion")]
use burn_cubecl::CubeBackend;
use burn_cubecl::{Cube, tensor::CubeTensor};

/// The tensor itself, once all that is queued for it has been launched.
pub fn resolve_float(tensor: FloatTensor<Cube>) -> CubeTensor {
    #[cfg(feature = "fusion")]
    let tensor = tensor.client.clone().resolve_tensor_float::<CubeBackend>(tensor);
    tensor
}

/// As [`resolve_float`].
pub fn resolve_int(tensor: IntTensor<Cube>) -> CubeTensor {
    #[cfg(feature = "fusion")]
    let tensor = tensor.client.clone().resolve_tensor_int::<CubeBackend>(tensor);
    tensor
}

/// As [`resolve_float`].
pub fn resolve_bool(tensor: BoolTensor<Cube>) -> CubeTensor {
    #[cfg(feature = "fusion")]
    let tensor = tensor.client.clone().resolve_tensor_bool::<CubeBackend>(tensor);
    tensor
}

/// A tensor of any kind as one that operations can be queued for.
pub fn enter(tensor: CubeTensor) -> FloatTensor<Cube> {
    #[cfg(feature = "fusion")]
    let tensor = {
        let client = get_client::<CubeBackend>(&tensor.device);
        let (shape, dtype) = (tensor.shape(), tensor.dtype);
        // The handle is the same whatever the kind.
        let handle = CubeBackend::float_tensor_handle(tensor);
        let init = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
        let [tensor] = client
            .register(StreamId::current(), OperationIr::Init(init), NoOp::<CubeBackend>::new())
            .try_into()
            .unwrap_or_else(|outputs: Vec<_>| unreachable!("an init has {} outputs", outputs.len()));
        tensor
    };
    tensor
}
