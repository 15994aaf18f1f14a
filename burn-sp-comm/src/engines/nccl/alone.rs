//! A rank that is alone, where there is a device: the libraries, communicators, groups and host memory's way to the
//! device and back. A group of one has no use for the engine otherwise.

use super::calls::{Call, Library, What};
use super::device::OnDevice;
use super::devices;
use super::link::Link;
use super::world::{Group, Known, World};
use crate::engines::processes::{Control, Hub, ProcessWorld as _};
use crate::engines::shared::activity;
use crate::engines::shared::seat::World as _;
use crate::{Buffer, CudaOrder, Site};
use burn_std::DType;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

/// What the library makes of a tensor when there is one rank: the tensor.
fn everything(world: &World, group: &Arc<Group>, link: &Arc<Link>, call: &activity::Call) {
    let library = OnDevice {
        world,
        group,
        link,
        call,
        memory: None,
        deadline: Instant::now() + TIMEOUT,
    };
    let floats = || Buffer::from_slice(&[1.5f32, -2.0, 3.25], [3]);
    let bools = || Buffer::from_slice(&[true, false, true, true], [4]);
    let call = |what: What, from: Option<Buffer>, to: Option<(usize, DType)>| Call {
        what,
        from,
        to: to.map(|(length, dtype)| (vec![length], dtype)),
    };
    let calls = vec![
        call(What::AllReduce, Some(floats()), Some((3, DType::F32))),
        call(What::AllReduce, Some(bools()), Some((4, bools().dtype()))),
        call(What::AllGather, Some(floats()), Some((3, DType::F32))),
        call(What::ReduceScatter, Some(floats()), Some((3, DType::F32))),
        call(What::Broadcast { root: 0 }, Some(floats()), None),
        call(What::Send { to: 0 }, Some(floats()), None),
        call(What::Receive { from: 0 }, None, Some((3, DType::F32))),
        call(
            What::AllReduce,
            Some(Buffer::from_slice::<f32>(&[], [0])),
            Some((0, DType::F32)),
        ),
    ];
    let results = library.group(calls).unwrap();
    for (place, result) in results.iter().enumerate() {
        match (place, result) {
            (4 | 5, result) => assert!(result.is_none()),
            (1, Some(result)) => assert_eq!(result.to_vec::<bool>(), [true, false, true, true]),
            (7, Some(result)) => assert_eq!(result.shape(), [0]),
            (_, Some(result)) => assert_eq!(result.to_vec::<f32>(), [1.5, -2.0, 3.25], "call {place}"),
            (_, None) => panic!("call {place} has written nothing"),
        }
    }
}

#[test]
fn a_communicator_of_one() {
    match devices() {
        Err(missing) => return println!("skipped: {missing}"),
        Ok(0) => return println!("skipped: there is no CUDA device"),
        Ok(_) => {}
    }
    let (hub, address) = Hub::start(1, TIMEOUT).unwrap();
    let control = Control::join(0, 1, TIMEOUT, &address).unwrap();
    let everyone = Group::everyone(1, 0, Known::default());
    let world = World::new(control.clone(), 0, CudaOrder::default(), &everyone).unwrap();
    let call = activity::Call {
        name: "all_reduce",
        axis: "world".into(),
        sequence: 0,
        site: Site::here().into(),
    };
    // One of its own, and one that is split from it.
    let again = world.subgroup(&everyone, 0, &[0], "again", 1).unwrap();
    for group in [&everyone, &again] {
        let link = world.link(group, &call, Instant::now() + TIMEOUT).unwrap();
        everything(&world, group, &link, &call);
    }
    world.watch.idle().unwrap();
    control.announce_end(world.groups().called());
    control.await_all().unwrap();
    world.end();
    hub.join();
}
