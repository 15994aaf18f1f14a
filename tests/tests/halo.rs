//! What each rank reads of the positions before its own: every rank's buffer by coordinates, and gradients that return to
//! their owner, counted.

mod common;

use burn::tensor::{DType, Device, Tensor, TensorData, module::conv1d, ops::ConvOptions};
use burn_sp::comm::Parts;
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split, Window};
use burn_sp::{SpDevice, SpTensor};
use common::{contains, f64s, failure, ranks};

const AXIS: Axis = Axis::Ulysses;

/// A window, and the definition again: the newest input that an output reads.
struct Rule {
    window: Window,
    behind: usize,
    newest: fn(usize) -> usize,
}

fn rules() -> Vec<Rule> {
    let rule = |window: fn(Window) -> Window, newest: fn(usize) -> usize| {
        move |behind: usize| Rule {
            window: window(Window::new(behind)),
            behind,
            newest,
        }
    };
    let same = rule(|window| window, |output| output);
    let down2 = rule(|window| window.down(2), |output| 2 * output);
    let down3 = rule(|window| window.down(3), |output| 3 * output);
    let up2 = rule(|window| window.up(2), |output| output.div_ceil(2));
    vec![
        same(0),
        same(2),
        same(5),
        down2(2),
        down2(0),
        down2(3),
        down3(1),
        up2(0),
        up2(2),
    ]
}

impl Rule {
    fn outputs(&self, len: usize) -> usize {
        (0..).take_while(|output| (self.newest)(*output) < len).count()
    }

    /// Every input that an output reads.
    fn reads(&self, output: usize) -> Vec<usize> {
        let newest = (self.newest)(output);
        (newest.saturating_sub(self.behind)..=newest).collect()
    }
}

/// Even, uneven, with a rank that has nothing, backwards.
fn splits(len: usize, size: usize) -> Vec<Split> {
    let cuts = |at: &dyn Fn(usize) -> usize| -> Vec<_> { (0..size).map(|rank| vec![at(rank)..at(rank + 1)]).collect() };
    let even = Split::Contiguous.parts(len, size);
    let early = cuts(&|rank| (rank * rank).min(len) * usize::from(rank < size) + len * usize::from(rank == size));
    let first_all = cuts(&|rank| if rank == 0 { 0 } else { len });
    let backwards = (0..size).rev().map(|rank| even.of(rank).to_vec()).collect();
    let explicit = [early, first_all, backwards].map(|ranges| Split::Explicit(Parts::new(ranges)));
    std::iter::once(Split::Contiguous).chain(explicit).collect()
}

/// `[2, len, 3]`, each element by its coordinates.
fn coordinates(len: usize, positions: &[usize]) -> Vec<f64> {
    assert!(positions.iter().all(|position| *position < len));
    let row = |batch: usize| move |position: usize| (0..3).map(move |d| (1_000 * batch + 10 * position + d) as f64);
    (0..2)
        .flat_map(|batch| positions.iter().copied().flat_map(row(batch)))
        .collect()
}

fn everywhere(check: impl Fn(&SpDevice, usize, Split, &Rule) + Send + Sync) {
    let (sizes, lengths) = match common::device() == Device::flex() {
        true => (1..=4, (0..=9).collect::<Vec<_>>()),
        false => (2..=3, vec![5]),
    };
    for size in sizes {
        ranks(MeshShape::ulysses(size), |device| {
            for len in &lengths {
                for split in splits(*len, size) {
                    for rule in rules() {
                        check(&device, *len, split.clone(), &rule);
                    }
                }
            }
        });
    }
}

fn own(split: &Split, len: usize, device: &SpDevice) -> Vec<usize> {
    let parts = split.parts(len, device.mesh().size(AXIS));
    parts.of(device.rank()).iter().cloned().flatten().collect()
}

fn shard(device: &SpDevice, len: usize, split: Split, whole: Tensor<3>) -> SpTensor<3> {
    device.distribute(whole, &Layout::replicated([2, len, 3]).shard(1, AXIS, split))
}

#[test]
fn every_rank_gets_what_its_outputs_read() {
    everywhere(|device, len, split, rule| {
        let own = own(&split, len, device);
        let outputs: Vec<usize> = (0..rule.outputs(len))
            .filter(|u| own.contains(&(rule.newest)(*u)))
            .collect();
        let mut reads: Vec<usize> = outputs.iter().flat_map(|output| rule.reads(*output)).collect();
        reads.sort();
        // With a stride beyond the width, what lies between comes along.
        let reads: Vec<usize> = match (reads.first(), reads.last()) {
            (Some(first), Some(last)) => (*first..=*last).collect(),
            _ => vec![],
        };
        let whole = coordinates(len, &(0..len).collect::<Vec<_>>());
        let whole = common::tensor(&whole, [2, len, 3], DType::F32, device.device());
        let x = shard(device, len, split.clone(), whole);
        let context = format!(
            "rank {} of {}, {len} by {split:?}, {:?}",
            device.rank(),
            device.mesh().size(AXIS),
            rule.window
        );
        let y = x.windowed(1, rule.window, |x, part| {
            assert_eq!(x.dims(), [2, reads.len(), 3], "{context}");
            assert_eq!(f64s(&x), coordinates(len, &reads), "{context}");
            assert_eq!(part.reads.clone().collect::<Vec<_>>(), reads, "{context}");
            assert_eq!(part.outputs.clone().collect::<Vec<_>>(), outputs, "{context}");
            if let Some(first) = outputs.first() {
                assert_eq!(part.missing + rule.reads(*first).len(), rule.behind + 1, "{context}");
            }
            Tensor::zeros([2, outputs.len(), 5], &x.device())
        });
        assert_eq!(y.global_shape(), [2, rule.outputs(len), 5], "{context}");
        assert_eq!(y.positions(1).iter().collect::<Vec<_>>(), outputs, "{context}");
        assert_eq!(y.layout().placement(AXIS), Placement::Shard(1), "{context}");
    });
}

/// Each output is the sum of what it reads, times its number; the loss is the sum of the outputs.
#[test]
fn gradients_return_to_their_owner() {
    everywhere(|device, len, split, rule| {
        let own = own(&split, len, device);
        let values = Tensor::<3>::ones([2, own.len(), 3], device.device()).require_grad();
        let layout = Layout::replicated([2, len, 3]).shard(1, AXIS, split.clone());
        let x = SpTensor::from_local(values.clone(), layout, device);
        let y = x.windowed(1, rule.window, |x, part| {
            let outputs = part.outputs.clone().map(|output| {
                let reads = rule.reads(output);
                let from = reads[0] - part.reads.start;
                x.clone()
                    .narrow(1, from, reads.len())
                    .sum_dim(1)
                    .mul_scalar((output + 1) as f64)
            });
            match part.outputs.is_empty() {
                true => x,
                false => Tensor::cat(outputs.collect(), 1),
            }
        });
        // As each output of the whole sees it.
        let mut expected = vec![0.0; len];
        for output in 0..rule.outputs(len) {
            rule.reads(output)
                .into_iter()
                .for_each(|input| expected[input] += (output + 1) as f64);
        }
        let expected: Vec<f64> = own.iter().flat_map(|position| [expected[*position]; 3]).collect();
        let grads = y.into_local().sum().backward();
        let found = values.grad(&grads).map_or(vec![], |grad| f64s(&grad));
        let context = format!(
            "rank {} of {}, {len} by {split:?}, {:?}",
            device.rank(),
            device.mesh().size(AXIS),
            rule.window
        );
        assert_eq!(found, [expected.clone(), expected].concat(), "{context}");
    });
}

/// Case 36: width 3, 8 steps, also with the two steps of the halo on two ranks.
#[test]
fn a_causal_convolution_of_width_3() {
    let weight = [100.0, 10.0, 1.0];
    for size in [1, 2, 3, 4, 8] {
        let found = ranks(MeshShape::ulysses(size), |device| {
            let weight =
                Tensor::<3>::from_data(TensorData::new(weight.to_vec(), [1, 1, 3]), device.device()).require_grad();
            let x: Vec<f64> = (1..=8).map(f64::from).collect();
            let x = common::tensor(&x, [1, 1, 8], DType::F32, device.device()).require_grad();
            let layout = Layout::replicated([1, 1, 8]).shard(2, AXIS, Split::Contiguous);
            let y = device
                .distribute(x.clone(), &layout)
                .windowed(2, Window::new(2), |x, part| {
                    let x = x.pad([(0, 0), (0, 0), (part.missing, 0)], 0.0);
                    conv1d(x, weight.clone(), None, ConvOptions::new([1], [0], [1], 1))
                });
            let whole = f64s(y.clone().gather().local());
            let grads = y.into_local().sum().backward();
            [
                whole,
                f64s(&x.grad(&grads).expect("x is read")),
                f64s(&weight.grad(&grads).expect("so is the weight")),
            ]
        });
        let whole = [1.0, 12.0, 123.0, 234.0, 345.0, 456.0, 567.0, 678.0];
        assert!(found.iter().all(|rank| rank[0] == whole), "{size} ranks: {found:?}");
        let sum = |which: usize| {
            let terms = found.iter().map(|rank| rank[which].clone());
            terms.reduce(|sum, term| sum.iter().zip(term).map(|(a, b)| a + b).collect())
        };
        let dx = vec![111.0, 111.0, 111.0, 111.0, 111.0, 111.0, 11.0, 1.0];
        assert_eq!(sum(1), Some(dx), "{size} ranks");
        // The sums of 1..=6, 1..=7 and 1..=8.
        assert_eq!(sum(2), Some(vec![21.0, 28.0, 36.0]), "{size} ranks");
    }
}

/// One all-to-all forward and one backward, of the halo alone; none where nothing before a rank's own is read.
#[test]
fn a_halo_is_all_that_moves() {
    let found = ranks(MeshShape::ulysses(4), |device| {
        let counted = || {
            let counters = device.mesh().world().statistics().into_iter();
            let (mut calls, mut bytes) = (0, 0);
            for counter in counters.filter(|counter| counter.calls > 0) {
                assert_eq!(counter.op, "all_to_all");
                calls += counter.calls;
                bytes += counter.bytes_sent;
            }
            (calls, bytes)
        };
        let run = |window: Window| {
            let values = Tensor::<3>::ones([2, 3, 3], device.device()).require_grad();
            let layout = Layout::replicated([2, 12, 3]).shard(1, AXIS, Split::Contiguous);
            let y = SpTensor::from_local(values, layout, &device).windowed(1, window, |x, part| {
                x.narrow(1, part.reads.len() - part.outputs.len(), part.outputs.len())
            });
            y.into_local().sum()
        };
        run(Window::new(0)).backward();
        let none = counted();
        let loss = run(Window::new(2));
        let forward = counted();
        loss.backward();
        [none, forward, counted()]
    });
    // Two positions of 2 x 3 numbers of 4 bytes.
    let halo = 2 * 6 * 4;
    for (rank, counts) in found.into_iter().enumerate() {
        let (next, before) = (u64::from(rank < 3) * halo, u64::from(rank > 0) * halo);
        assert_eq!(counts, [(0, 0), (1, next), (2, next + before)], "rank {rank}");
    }
}

#[test]
fn what_cannot_be_windowed_is_refused() {
    let window = |x: SpTensor<3>| {
        x.windowed(1, Window::new(1), |x, part| x.narrow(1, 0, part.outputs.len()))
            .local()
            .dims()
    };
    let layout = || Layout::replicated([2, 8, 3]);
    let on = |mesh: MeshShape, layout: Layout| {
        failure(mesh, |device| {
            let whole = Tensor::<3>::zeros([2, 8, 3], device.device());
            let [axis] = layout.partial_axes() else {
                window(device.distribute(whole, &layout));
                return;
            };
            window(SpTensor::replicated(whole, &device).redistribute(*axis, Placement::Partial));
        })
    };
    let several = on(MeshShape::ulysses(2), layout().shard(1, AXIS, Split::Zigzag));
    contains(
        &several,
        &[
            "windowed",
            "rank 0",
            "several ranges of dimension 1",
            "Split::Contiguous",
        ],
    );
    let nested = layout()
        .shard(1, Axis::Ring, Split::Contiguous)
        .shard(1, AXIS, Split::Contiguous);
    let nested = on(MeshShape::ring(2).with_ulysses(2), nested);
    contains(
        &nested,
        &[
            "windowed",
            "several axes shard dimension 1",
            "redistribute ulysses first",
        ],
    );
    let partial = on(MeshShape::ulysses(2), layout().partial(AXIS));
    contains(&partial, &["windowed", "Placement::Replicate"]);
    let wrong = failure(MeshShape::ulysses(2), |device| {
        let whole = Tensor::<3>::zeros([2, 8, 3], device.device());
        let x = shard(&device, 8, Split::Contiguous, whole);
        x.windowed(1, Window::new(1).down(2), |x, _| x);
    });
    contains(&wrong, &["windowed", "return this rank's outputs"]);
}
