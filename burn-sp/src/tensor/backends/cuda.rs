//! CUDA: the addresses of CubeCL's tensors and the stream on which it works, for NCCL. The only file that knows them.
//!
//! CubeCL has no call for this: its collectives are those of one process. What is used instead is public, but not meant
//! for others: the thread that makes all calls of a device, and that thread's table of streams. A call of CubeCL that
//! hands a closure the stream and the resources of some handles would replace [`on_stream`]. [`host_synced`] needs
//! nothing of it.

use std::any::Any;
use std::fmt::Display;
use std::sync::Arc;

use burn::tensor::DType;
use burn_cubecl::{
    CubeDevice,
    cubecl::{
        client::Client,
        cuda::CudaRuntime,
        device_handle::DeviceHandle,
        server::{Handle, ServerStorage},
    },
    kernel::into_contiguous,
    ops::{numeric::empty_device_contiguous_dtype, reshape},
};
use burn_sp_comm::{CommError, CudaOrder, CudaTensor, CudaWork};
use burn_std::{future::block_on, stream::StreamId};
use cubecl_server::{runtime::Runtime, stream::WriteScoped};

use super::cube::OnCube;

type CudaServer = <CudaRuntime as Runtime>::Server;

impl OnCube {
    pub(super) fn on_cuda(&self) -> Option<&dyn CudaTensor> {
        matches!(self.0.device, CubeDevice::Cuda(_)).then_some(self)
    }
}

impl CudaTensor for OnCube {
    fn dense(&self, shape: &[usize]) -> Arc<dyn CudaTensor> {
        Arc::new(OnCube(reshape(into_contiguous(self.0.clone()), shape.to_vec().into())))
    }

    fn empty(&self, shape: &[usize], dtype: DType) -> Arc<dyn CudaTensor> {
        let (client, device) = (self.0.client.clone(), self.0.device.clone());
        let empty = empty_device_contiguous_dtype(client, device, shape.to_vec().into(), dtype);
        Arc::new(OnCube(empty))
    }

    fn with_addresses(
        &self,
        order: CudaOrder,
        tensors: &[Arc<dyn CudaTensor>],
        work: CudaWork<'_>,
    ) -> Result<(), CommError> {
        let client = &self.0.client;
        let handle = |tensor: &Arc<dyn CudaTensor>| match (&**tensor as &dyn Any).downcast_ref() {
            Some(OnCube(tensor)) if tensor.client.service_id() == client.service_id() => Ok(tensor.handle.clone()),
            _ => Err(CommError::invalid("tensors of one call are on different devices")),
        };
        let handles = tensors.iter().map(handle).collect::<Result<_, _>>()?;
        match order {
            CudaOrder::OnStream => on_stream(client, handles, work),
            CudaOrder::HostSynced => host_synced(client, handles, work),
        }
    }
}

/// Runs `work` on the thread that makes the device's calls, with the stream of the calling thread: so what it puts there
/// comes after all that was put there before, and before all that comes after. The calling thread waits until it is
/// there, not until the device has done it.
///
/// Memory that is freed meanwhile is used again by work on the same stream, thus later; for tensors of other streams,
/// `resolve` makes the stream wait for theirs, and keeps their memory until it has done with them.
fn on_stream(client: &Client, handles: Vec<Handle>, work: CudaWork<'_>) -> Result<(), CommError> {
    let id = StreamId::current();
    let enqueue = move |server: &mut CudaServer| {
        let bindings: Vec<_> = handles.into_iter().map(Handle::binding).collect();
        let mut resources = Vec::with_capacity(bindings.len());
        for binding in &bindings {
            resources.push(server.get_resource(binding.clone(), id).map_err(device_fault)?);
        }
        let addresses: Vec<u64> = resources.iter().map(|resource| resource.resource().ptr).collect();
        let streams = server.write_streams();
        let mut streams = streams.resolve(id, bindings.iter()).map_err(device_fault)?;
        work(streams.current().sys as u64, &addresses)
    };
    let runner = DeviceHandle::<CudaServer>::new(client.service_id().device);
    let enqueued = runner.submit_blocking(enqueue);
    enqueued.map_err(|error| device_fault(format!("{error:?}")))?
}

/// Waits for the device before, and leaves it to `work` to be done when it returns.
fn host_synced(client: &Client, handles: Vec<Handle>, work: CudaWork<'_>) -> Result<(), CommError> {
    let mut resources = Vec::with_capacity(handles.len());
    for handle in handles {
        // This also makes this thread's stream wait for those of others that have written the tensor.
        resources.push(client.get_resource::<CudaServer>(handle).map_err(device_fault)?);
    }
    block_on(client.sync()).map_err(device_fault)?;
    let addresses: Vec<u64> = resources.iter().map(|resource| resource.resource().ptr).collect();
    work(0, &addresses)
}

fn device_fault(error: impl Display) -> CommError {
    CommError::invalid(format!("the CUDA device has failed: {error}"))
}
