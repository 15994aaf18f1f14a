//! Ranks as processes with a CUDA device each: as many as there are devices, up to four. Skipped where CUDA or NCCL cannot
//! be loaded, or there is no device. With one device this tries the start and the end alone, as a group of one rank
//! sends nothing.

use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::comm::engines::nccl::{self, NcclConfig};
use burn_sp::comm::{Buffer, Communicator};
use burn_sp::prelude::*;

const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn ranks_on_devices() {
    let ranks = match nccl::devices() {
        Err(missing) => return println!("skipped: {missing}"),
        Ok(0) => return println!("skipped: there is no CUDA device"),
        Ok(devices) => devices.min(4),
    };
    for (order, port) in [("on-stream", "29531"), ("host-synced", "29532")] {
        let start = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "a_rank", "--nocapture"])
                .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)])
                .envs([("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", rank)].map(|(k, v)| (k, v.to_string())))
                .env(nccl::ORDER_VARIABLE, order)
                .spawn()
                .unwrap()
        };
        let mut processes: Vec<Child> = (0..ranks).map(start).collect();
        let until = Instant::now() + 3 * TIMEOUT;
        for (rank, process) in processes.iter_mut().enumerate() {
            let status = loop {
                match process.try_wait().unwrap() {
                    Some(status) => break status,
                    None if Instant::now() >= until => {
                        process.kill().unwrap();
                        panic!("{order}: rank {rank} of {ranks} came to no end");
                    }
                    None => std::thread::sleep(Duration::from_millis(20)),
                }
            };
            assert!(status.success(), "{order}: rank {rank} of {ranks}: {status}");
        }
    }
}

#[test]
#[ignore = "a process of ranks_on_devices"]
fn a_rank() {
    if std::env::var_os(nccl::ORDER_VARIABLE).is_none() {
        return println!("skipped: not started by ranks_on_devices");
    }
    let config = NcclConfig {
        timeout: TIMEOUT,
        ..Default::default()
    };
    let device = Device::cuda(nccl::device().unwrap());
    nccl::launch(&config, |comm| {
        in_host_memory(&*comm);
        let mesh = Mesh::new(MeshShape::ulysses(comm.size()), comm).unwrap();
        let device = SpDevice::new(device, Arc::new(mesh));
        for dtype in [DType::F32, DType::BF16] {
            for split in [Split::Contiguous, Split::Zigzag] {
                // Even and uneven, a batch of one and of several.
                for shape in [[1, 24, 12], [2, 24, 12], [2, 13, 7]] {
                    transitions(&device, shape, dtype, split.clone());
                }
            }
        }
    })
    .unwrap();
}

/// Every layout change, against the slices of a tensor that each rank has whole.
fn transitions(device: &SpDevice, shape: [usize; 3], dtype: DType, split: Split) {
    let elements = shape.iter().product();
    // Sums of a few of these are exact in bf16.
    let data = TensorData::new((0..elements).map(|i| (i % 5) as f32).collect(), shape).convert_dtype(dtype);
    let whole = Tensor::<3>::from_data(data, (device.device(), dtype));
    let layout = |dim: usize, split: Split| Layout::replicated(shape).shard(dim, Axis::Ulysses, split);
    let equal = |found: Tensor<3>, expected: Tensor<3>, what: &str| {
        let (found, expected) = (found.into_data(), expected.into_data());
        assert_eq!(
            found,
            expected,
            "{what}, {shape:?}, {dtype:?}, {split:?}, rank {}",
            device.rank()
        );
    };
    let tokens = device.distribute(whole.clone(), &layout(1, split.clone()));
    equal(tokens.clone().gather().into_local(), whole.clone(), "all-gather");
    let features = device.distribute(whole.clone(), &layout(2, Split::Contiguous));
    let scattered = tokens.clone().redistribute(Axis::Ulysses, Placement::Shard(2));
    equal(scattered.into_local(), features.into_local(), "all-to-all");
    let sum = tokens.clone().sum_dim(1).gather().into_local();
    equal(sum, whole.clone().sum_dim(1), "all-reduce");
    // Every rank's own tokens and zeros elsewhere: their sum is the tensor.
    let partial = tokens.clone().redistribute(Axis::Ulysses, Placement::Partial);
    let summed = partial.shard(Axis::Ulysses, 1, split.clone());
    equal(summed.into_local(), tokens.into_local(), "reduce-scatter");
}

/// Tensors of the host, which go by way of the device; and a barrier.
fn in_host_memory(comm: &dyn Communicator) {
    let (rank, size) = (comm.rank(), comm.size());
    let own = Buffer::from_slice(&[rank as f64, 1.0], [2]);
    let sum = comm.all_reduce(own).unwrap().to_vec::<f64>();
    assert_eq!(sum, [(size * (size - 1) / 2) as f64, size as f64]);
    let any = Buffer::from_slice(&[rank == 0], [1]);
    assert_eq!(comm.all_reduce(any).unwrap().to_vec::<bool>(), [true]);
    // Every rank's is as long as its number.
    let shifted = comm
        .shift(Buffer::from_slice(&vec![rank as i32; rank], [rank]), 1)
        .unwrap();
    let before = (rank + size - 1) % size;
    assert_eq!(shifted.to_vec::<i32>(), vec![before as i32; before]);
    let bytes = match rank {
        0 => Buffer::from_slice(&[7u8, 8, 9], [3]),
        _ => Buffer::empty(),
    };
    assert_eq!(comm.broadcast(bytes, 0).unwrap().to_vec::<u8>(), [7, 8, 9]);
    comm.barrier().unwrap();
}
