//! Tensors that are not in host memory: engines never look into them.

mod common;

use burn_sp_comm::{Buffer, Collective, CommError, DeviceTensor, Plan, Site, Transfer};
use burn_std::DType;
use common::*;
use std::sync::Arc;

/// A device's memory, as far as a test needs one.
#[derive(Debug)]
struct OnTest {
    /// Which device.
    device: usize,
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl OnTest {
    fn buffer(device: usize, shape: Vec<usize>, values: Vec<f32>) -> Buffer {
        Buffer::on_device(Arc::new(OnTest { device, shape, values }))
    }

    fn at(&self, index: &[usize]) -> f32 {
        let flat = index
            .iter()
            .zip(&self.shape)
            .fold(0, |flat, (i, length)| flat * length + i);
        self.values[flat]
    }
}

impl DeviceTensor for OnTest {
    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn assemble(&self, plan: &Plan, sources: &[Option<&Buffer>]) -> Result<Arc<dyn DeviceTensor>, CommError> {
        let element = |index: &Vec<usize>| {
            let inside = |start: &[usize], shape: &[usize]| {
                (0..index.len()).all(|d| (start[d]..start[d] + shape[d]).contains(&index[d]))
            };
            let tile = plan
                .tiles
                .iter()
                .find(|tile| inside(&tile.start, &tile.shape))
                .expect("tiles cover");
            let of = |source: &burn_sp_comm::plan::Source| {
                let tensor = sources[source.rank]
                    .and_then(Buffer::device::<OnTest>)
                    .expect("a source");
                let place: Vec<_> = (0..index.len())
                    .map(|d| source.start[d] + index[d] - tile.start[d])
                    .collect();
                tensor.at(&place)
            };
            tile.sources.iter().map(of).sum()
        };
        Ok(Arc::new(OnTest {
            device: self.device,
            shape: plan.shape.clone(),
            values: coordinates(&whole(&plan.shape)).iter().map(element).collect(),
        }))
    }

    fn to_host(&self) -> Result<Buffer, CommError> {
        Ok(Buffer::from_slice(&self.values, self.shape.clone()))
    }

    fn upload(&self, buffer: Buffer) -> Result<Arc<dyn DeviceTensor>, CommError> {
        Ok(Arc::new(OnTest {
            device: self.device,
            shape: buffer.shape().to_vec(),
            values: buffer.to_vec(),
        }))
    }
}

#[test]
fn every_operation() {
    const SHAPE: [usize; 4] = [2, 5, 3, 2];
    for size in 1..=4 {
        let ops = operations(&SHAPE, size, &[1, 2]);
        world(size, |comm| {
            for op in &ops {
                let own = input(op, comm.rank(), &SHAPE);
                let values = local::<f32>(&own, comm.rank()).to_vec();
                let transfer = Transfer {
                    op: op.clone(),
                    buffer: OnTest::buffer(comm.rank(), shape_of(&own), values),
                };
                let found = comm.run(vec![transfer], Site::here()).unwrap().remove(0);
                let (shape, expected) = expected::<f32>(op, size, comm.rank(), &SHAPE);
                let tensor = found.device::<OnTest>().expect("a tensor on the test's device");
                assert_eq!((&tensor.shape, &tensor.values), (&shape, &expected), "{op:?}");
                // What is put together lies with the rank that asked; what is handed over stays where it is.
                if !matches!(op, Collective::Shift { .. } | Collective::Broadcast { .. }) {
                    assert_eq!(tensor.device, comm.rank(), "{op:?}");
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn ranks_must_agree_where_their_tensors_are_on_threads() {
    let error = world(2, |comm| {
        let buffer = match comm.rank() {
            0 => Buffer::from_slice(&[1.0f32], [1]),
            _ => OnTest::buffer(1, vec![1], vec![1.0]),
        };
        comm.all_reduce(buffer).map(|_| ())
    })
    .unwrap_err();
    let CommError::Mismatch { difference, report } = &error else {
        panic!("{error}");
    };
    assert_eq!(difference, "memory");
    for rank in [
        "rank 0: all_reduce over world [1, f32] in host memory",
        "rank 1: all_reduce over world [1, f32] on a device",
    ] {
        assert!(report.contains(rank), "{report}");
    }
}

#[test]
fn one_call_has_its_tensors_in_one_place() {
    let errors = world(1, |comm| {
        let transfer = |buffer| Transfer {
            op: Collective::AllReduce,
            buffer,
        };
        let both = vec![
            transfer(Buffer::from_slice(&[1.0f32], [1])),
            transfer(OnTest::buffer(0, vec![1], vec![1.0])),
        ];
        comm.run(both, Site::here()).map(|_| ()).unwrap_err()
    })
    .unwrap();
    for error in errors {
        assert!(error.to_string().contains("in host memory and on a device"), "{error}");
    }
}

#[cfg(feature = "mpi")]
#[test]
fn over_mpi() {
    again_over_mpi(4, &["on_threads"]);
}
