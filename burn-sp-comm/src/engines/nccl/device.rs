//! The calls, made on the rank's CUDA device.

use super::calls::{Call, Library, What, elsewhere, reduction};
use super::link::{Link, fine};
use super::watch::UnderWay;
use super::world::{Group, World};
use crate::buffer::Storage;
use crate::engines::shared::activity;
use crate::{Buffer, CommError, CudaOrder, CudaTensor};
use burn_std::{Bytes, DType};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError};
use cudarc::nccl::sys::{self, cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank's device.
pub struct Device {
    pub context: Arc<CudaContext>,
    /// For work that the host waits for.
    stream: Arc<CudaStream>,
}

impl Device {
    pub fn open(number: usize) -> Result<Self, DriverError> {
        let context = CudaContext::new(number)?;
        let stream = context.new_stream()?;
        Ok(Device { context, stream })
    }
}

/// The library, for one call of a collective.
pub struct OnDevice<'a> {
    pub world: &'a World,
    pub group: &'a Arc<Group>,
    pub link: &'a Arc<Link>,
    pub call: &'a activity::Call,
    /// A tensor in whose memory the results are to be: none for the host's.
    pub memory: Option<&'a dyn CudaTensor>,
    pub deadline: Instant,
}

/// A call with the places of its operands in a list of addresses.
struct Asked {
    what: What,
    from: Option<usize>,
    to: Option<usize>,
    /// As NCCL counts them: those that one rank sends, or receives of a sum.
    elements: usize,
    dtype: DType,
}

impl Library for OnDevice<'_> {
    fn group(&self, calls: Vec<Call>) -> Result<Vec<Option<Buffer>>, CommError> {
        match self.memory {
            Some(memory) => self.in_device_memory(memory, calls),
            None => self.in_host_memory(calls),
        }
    }
}

impl OnDevice<'_> {
    fn in_device_memory(&self, memory: &dyn CudaTensor, calls: Vec<Call>) -> Result<Vec<Option<Buffer>>, CommError> {
        let mut tensors: Vec<Arc<dyn CudaTensor>> = Vec::new();
        let mut add = |tensor: Arc<dyn CudaTensor>| {
            tensors.push(tensor);
            tensors.len() - 1
        };
        let mut asked = Vec::with_capacity(calls.len());
        for call in &calls {
            let (elements, dtype) = counted(call);
            let from = call.from.as_ref().map(on_cuda).transpose()?;
            asked.push(Asked {
                what: call.what,
                from: from.map(&mut add),
                to: call.to.as_ref().map(|(shape, dtype)| add(memory.empty(shape, *dtype))),
                elements,
                dtype,
            });
        }
        // Empty tensors may have no address.
        let made: Vec<&Asked> = asked.iter().filter(|asked| asked.elements > 0).collect();
        let order = self.world.order;
        if !made.is_empty() {
            let used: Vec<usize> = made.iter().flat_map(|asked| [asked.from, asked.to]).flatten().collect();
            let used: Vec<_> = used.into_iter().map(|place| tensors[place].clone()).collect();
            let work = Box::new(|stream: u64, addresses: &[u64]| match order {
                CudaOrder::OnStream => self.put_on_stream(stream as cudaStream_t, &made, addresses),
                CudaOrder::HostSynced => self.put_and_wait(&made, addresses),
            });
            memory.with_addresses(order, &used, work)?;
        }
        let written = asked
            .iter()
            .map(|asked| asked.to.map(|place| Buffer::on_device(tensors[place].clone())));
        Ok(written.collect())
    }

    /// By way of the device: NCCL reaches no host memory.
    fn in_host_memory(&self, calls: Vec<Call>) -> Result<Vec<Option<Buffer>>, CommError> {
        // NCCL is to be called in one order on all ranks, and what came before is on another stream.
        self.world.watch.idle()?;
        let stream = &self.world.device.stream;
        let mut slices: Vec<CudaSlice<u8>> = Vec::new();
        let mut asked = Vec::with_capacity(calls.len());
        for call in &calls {
            let Call { what, from, to } = call;
            let (elements, dtype) = counted(call);
            let mut places = [None, None];
            if elements > 0 {
                let read = from.as_ref().map(|from| match from.host() {
                    Some(view) => stream.clone_htod(&view.bytes[..]).map_err(|error| self.failed(error)),
                    None => Err(elsewhere()),
                });
                let written = to.as_ref().map(|(shape, dtype)| {
                    let bytes = shape.iter().product::<usize>() * dtype.size();
                    stream.alloc_zeros(bytes).map_err(|error| self.failed(error))
                });
                for (place, slice) in places.iter_mut().zip([read, written]) {
                    *place = slice.transpose()?.map(|slice| {
                        slices.push(slice);
                        slices.len() - 1
                    });
                }
            }
            let [from, to] = places;
            asked.push(Asked {
                what: *what,
                from,
                to,
                elements,
                dtype,
            });
        }
        let made: Vec<&Asked> = asked.iter().filter(|asked| asked.elements > 0).collect();
        if !made.is_empty() {
            let used = made.iter().flat_map(|asked| [asked.from, asked.to]).flatten();
            // Everything is on one stream, so the address needs no guard.
            let addresses: Vec<u64> = used.map(|place| slices[place].device_ptr(stream).0).collect();
            self.put_and_wait(&made, &addresses)?;
        }
        let written = |(call, asked): (Call, &Asked)| {
            let Some((shape, dtype)) = call.to else { return Ok(None) };
            let bytes = match asked.to {
                Some(place) => stream.clone_dtoh(&slices[place]).map_err(|error| self.failed(error))?,
                None => Vec::new(),
            };
            stream.synchronize().map_err(|error| self.failed(error))?;
            Buffer::contiguous(Bytes::from_bytes_vec(bytes), shape, dtype).map(Some)
        };
        calls.into_iter().zip(&asked).map(written).collect()
    }

    /// Puts the calls on a stream and has them watched. Addresses are those of the calls' operands, in their order.
    fn put_on_stream(&self, stream: cudaStream_t, calls: &[&Asked], addresses: &[u64]) -> Result<(), CommError> {
        // SAFETY: the stream is that of the tensors' device, whose context this is, and lives as long as the device.
        let wrapped = unsafe { self.world.device.context.wrap_borrowed_stream(stream as _) };
        let (begun, done) = self.put(&wrapped, calls, addresses)?;
        self.world.watch.add(UnderWay {
            begun,
            done,
            call: self.call.clone(),
            group: self.group.clone(),
            link: self.link.clone(),
            since: None,
        });
        Ok(())
    }

    /// Puts the calls on the engine's own stream, and waits for them.
    fn put_and_wait(&self, calls: &[&Asked], addresses: &[u64]) -> Result<(), CommError> {
        let (_, done) = self.put(&self.world.device.stream, calls, addresses)?;
        loop {
            if done.try_is_complete().map_err(|error| self.failed(error))? {
                // Ended by a failure, it has completed as well.
                return self.world.control.failure().map_or(Ok(()), Err);
            }
            if let Some(error) = self.world.control.failure() {
                return Err(error);
            }
            if let Some(fault) = self.link.fault() {
                return Err(self.failed(fault));
            }
            if Instant::now() >= self.deadline {
                return Err(self.world.control.late(self.waiting()));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Returns events of the moments before and after the calls.
    fn put(
        &self,
        stream: &Arc<CudaStream>,
        calls: &[&Asked],
        addresses: &[u64],
    ) -> Result<(CudaEvent, CudaEvent), CommError> {
        let mark = || {
            let event = self.world.device.context.new_event(None)?;
            event.record(stream).map(|()| event)
        };
        // This also makes the context that of the calling thread.
        let begun = mark().map_err(|error| self.failed(error))?;
        let ask = |comm: ncclComm_t| {
            let mut addresses = addresses.iter().copied();
            let mut address = |place: Option<usize>| place.and_then(|_| addresses.next());
            for call in calls {
                let (from, to) = (address(call.from), address(call.to));
                // SAFETY: the addresses are those of tensors of as many elements, which live as long as what was put on
                // their stream before they are freed.
                fine(unsafe { ask(call, from, to, comm, stream.cu_stream() as cudaStream_t) })?;
            }
            Ok(())
        };
        self.link.group(ask, self.deadline, || self.waiting())?;
        let done = mark().map_err(|error| self.failed(error))?;
        Ok((begun, done))
    }

    fn waiting(&self) -> String {
        self.world.waiting(self.group, self.call)
    }

    fn failed(&self, what: impl std::fmt::Display) -> CommError {
        self.world.failed(what)
    }
}

/// The elements that a call is about, as NCCL counts them, and their dtype.
fn counted(call: &Call) -> (usize, DType) {
    let read = call.from.as_ref().map(|from| (from.num_elements(), from.dtype()));
    let written = call.to.as_ref().map(|(shape, dtype)| (shape.iter().product(), *dtype));
    let counted = match call.what {
        What::ReduceScatter => written.or(read),
        _ => read.or(written),
    };
    counted.unwrap_or((0, DType::U8))
}

fn on_cuda(buffer: &Buffer) -> Result<Arc<dyn CudaTensor>, CommError> {
    match buffer.storage() {
        Storage::Device(tensor) => Ok(tensor.cuda().ok_or_else(elsewhere)?.dense(buffer.shape())),
        Storage::Host(_) => Err(elsewhere()),
    }
}

/// Makes one call of the library.
///
/// # Safety
/// The operands must be valid for the call's elements until the stream has done with them.
unsafe fn ask(
    call: &Asked,
    from: Option<u64>,
    to: Option<u64>,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // What is only moved is moved as bytes: then any dtype will do.
    let (bytes, byte) = (call.elements * call.dtype.size(), ncclDataType_t::ncclUint8);
    let read = from.or(to).unwrap_or(0) as *const c_void;
    let write = to.or(from).unwrap_or(0) as *mut c_void;
    // SAFETY: as promised by the caller.
    unsafe {
        match call.what {
            What::Send { to } => sys::ncclSend(read, bytes, byte, to as c_int, comm, stream),
            What::Receive { from } => sys::ncclRecv(write, bytes, byte, from as c_int, comm, stream),
            What::Broadcast { root } => sys::ncclBroadcast(read, write, bytes, byte, root as c_int, comm, stream),
            What::AllGather => sys::ncclAllGather(read, write, bytes, byte, comm, stream),
            What::AllReduce | What::ReduceScatter => {
                let Some((dtype, op)) = reduction(call.dtype) else {
                    return ncclResult_t::ncclInvalidArgument;
                };
                match call.what {
                    What::AllReduce => sys::ncclAllReduce(read, write, call.elements, dtype, op, comm, stream),
                    _ => sys::ncclReduceScatter(read, write, call.elements, dtype, op, comm, stream),
                }
            }
        }
    }
}
