//! CubeCL: a buffer holds the tensor itself, which stays on its device.

use std::sync::Arc;

use burn::backend::{
    TensorMetadata,
    ops::{BoolTensorOps, FloatTensorOps, IntTensorOps},
    tensor::{BoolTensor, Device, FloatTensor, IntTensor},
};
use burn::tensor::{DType, Slice, TensorData};
use burn_cubecl::{
    Cube, CubeBackend, CubeDevice,
    kernel::{cast, slice},
    ops::numeric::{add, empty_device_contiguous_dtype},
    tensor::CubeTensor,
};
use burn_sp_comm::{Buffer, CommError, DeviceTensor, Plan, plan::Tile, raise};
use burn_std::future::block_on;
use kernels_cubecl::cube::{enter, resolve_bool, resolve_float, resolve_int};

use crate::tensor::{SpBackend, SpOps, ops::plain_ops};

impl SpBackend for Cube {
    const IN_HOST_MEMORY: bool = false;

    /// One launch, however many rows.
    const ROWS_AT_ONCE: usize = usize::MAX;

    fn float_into_buffer(tensor: FloatTensor<Self>) -> Buffer {
        share(resolve_float(tensor))
    }

    fn float_from_buffer(buffer: Buffer, device: &Device<Self>) -> FloatTensor<Self> {
        enter(adopt(buffer, device))
    }

    fn int_into_buffer(tensor: IntTensor<Self>) -> Buffer {
        share(resolve_int(tensor))
    }

    fn int_from_buffer(buffer: Buffer, device: &Device<Self>) -> IntTensor<Self> {
        enter(adopt(buffer, device))
    }

    fn bool_into_buffer(tensor: BoolTensor<Self>) -> Buffer {
        share(resolve_bool(tensor))
    }

    fn bool_from_buffer(buffer: Buffer, device: &Device<Self>) -> BoolTensor<Self> {
        enter(adopt(buffer, device))
    }
}

plain_ops!(Cube);

/// A tensor in the memory of a CubeCL device.
///
/// Ranks are threads with a stream each. CubeCL lets work on a buffer wait for the stream that wrote it, and keeps the
/// buffer until that work is done, so nothing here waits for the device.
#[derive(Clone, Debug)]
pub(super) struct OnCube(pub(super) CubeTensor);

impl DeviceTensor for OnCube {
    fn shape(&self) -> Vec<usize> {
        self.0.shape().to_vec()
    }

    fn dtype(&self) -> DType {
        self.0.dtype
    }

    fn assemble(&self, plan: &Plan, sources: &[Option<&Buffer>]) -> Result<Arc<dyn DeviceTensor>, CommError> {
        let own = &self.0;
        let tiles: Vec<_> = plan.tiles.iter().filter(|tile| !tile.shape.contains(&0)).collect();
        let result = match tiles[..] {
            [tile] => tile_of(own, tile, sources)?,
            _ => {
                let (client, device) = (own.client.clone(), own.device.clone());
                let mut result = empty_device_contiguous_dtype(client, device, plan.shape.clone().into(), own.dtype);
                for tile in tiles {
                    result = CubeBackend::float_slice_assign(
                        result,
                        &at(&tile.start, &tile.shape),
                        tile_of(own, tile, sources)?,
                    );
                }
                result
            }
        };
        Ok(Arc::new(OnCube(result)))
    }

    fn to_host(&self) -> Result<Buffer, CommError> {
        let data = block_on(CubeBackend::float_into_data(self.0.clone()))
            .map_err(|error| CommError::invalid(format!("a tensor cannot be read from its device: {error}")))?;
        let (bytes, shape, dtype) = data.into_parts();
        Buffer::contiguous(bytes, shape.to_vec(), dtype)
    }

    fn upload(&self, buffer: Buffer) -> Result<Arc<dyn DeviceTensor>, CommError> {
        let (shape, dtype) = (buffer.shape().to_vec(), buffer.dtype());
        let data = TensorData::from_bytes(buffer.into_bytes()?, shape, dtype);
        let device = &self.0.device;
        Ok(Arc::new(OnCube(match dtype {
            DType::Bool(_) => CubeBackend::bool_from_data(data, device),
            DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16 => {
                CubeBackend::float_from_data(data, device)
            }
            _ => CubeBackend::int_from_data(data, device),
        })))
    }

    #[cfg(feature = "nccl")]
    fn cuda(&self) -> Option<&dyn burn_sp_comm::CudaTensor> {
        self.on_cuda()
    }
}

/// A tile of a plan, on the device of `own`.
fn tile_of(own: &CubeTensor, tile: &Tile, sources: &[Option<&Buffer>]) -> Result<CubeTensor, CommError> {
    let wide = match own.dtype {
        DType::F16 | DType::BF16 if tile.sources.len() > 1 => DType::F32,
        dtype => dtype,
    };
    let mut sum = None;
    for source in &tile.sources {
        let buffer = sources[source.rank];
        let OnCube(tensor) = buffer.and_then(Buffer::device).ok_or_else(|| {
            CommError::invalid(format!(
                "rank {} of the group sent no tensor on a CubeCL device",
                source.rank
            ))
        })?;
        let ranges: Vec<_> = source
            .start
            .iter()
            .zip(&tile.shape)
            .map(|(&start, &len)| start..start + len)
            .collect();
        let part = CubeBackend::float_to_device(slice(tensor.clone(), &ranges), &own.device);
        let part = if part.dtype == wide { part } else { cast(part, wide) };
        sum = Some(match sum {
            None => part,
            Some(sum) if matches!(wide, DType::Bool(_)) => CubeBackend::bool_or(sum, part),
            Some(sum) => add(sum, part),
        });
    }
    let sum = sum.expect("a tile has a source");
    Ok(if sum.dtype == own.dtype {
        sum
    } else {
        cast(sum, own.dtype)
    })
}

fn at(start: &[usize], shape: &[usize]) -> Vec<Slice> {
    start
        .iter()
        .zip(shape)
        .map(|(&start, &len)| Slice::from(start..start + len))
        .collect()
}

fn share(tensor: CubeTensor) -> Buffer {
    Buffer::on_device(Arc::new(OnCube(tensor)))
}

fn adopt(buffer: Buffer, device: &CubeDevice) -> CubeTensor {
    match buffer.device() {
        Some(OnCube(tensor)) => CubeBackend::float_to_device(tensor.clone(), device),
        None => raise(CommError::invalid(
            "a tensor that is not on a CubeCL device was sent to a rank on one",
        )),
    }
}
