//! Every layout change, by exhaustive enumeration: each rank's buffer is the slice that it should own (never a round
//! trip), and the gradient goes through the dual change.

mod common;

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_sp::comm::Parts;
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::{SpDevice, SpTensor};
use common::{contains, f64s, failure, ranks};

const AXIS: Axis = Axis::Ulysses;

/// A placement on the one axis.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    Shard(usize, Split),
    Replicate,
    Partial,
}

impl Place {
    fn dual(&self) -> Place {
        match self {
            Place::Replicate => Place::Partial,
            Place::Partial => Place::Replicate,
            shard => shard.clone(),
        }
    }

    fn layout(&self, shape: [usize; 3]) -> Layout {
        let whole = Layout::replicated(shape);
        match self {
            Place::Shard(dim, split) => whole.shard(*dim, AXIS, split.clone()),
            Place::Replicate => whole,
            Place::Partial => whole.partial(AXIS),
        }
    }
}

/// A whole tensor, as a test sees it: every element by its coordinates.
#[derive(Clone, Debug, PartialEq)]
struct Whole {
    shape: [usize; 3],
    values: Vec<f64>,
}

impl Whole {
    /// O2: the value says where it belongs.
    fn coordinates(shape: [usize; 3]) -> Self {
        Self::with(shape, |at| 1e4 * at[0] as f64 + 1e2 * at[1] as f64 + at[2] as f64 + 1.0)
    }

    fn with(shape: [usize; 3], value: impl Fn([usize; 3]) -> f64) -> Self {
        let [a, b, c] = shape;
        let all = (0..a * b * c).map(|i| value([i / (b * c).max(1), i / c.max(1) % b.max(1), i % c.max(1)]));
        Self {
            shape,
            values: all.collect(),
        }
    }

    fn scaled(&self, factor: f64) -> Self {
        Self {
            values: self.values.iter().map(|x| x * factor).collect(),
            ..*self
        }
    }

    /// The positions of one dimension, in that order.
    fn select(&self, dim: usize, positions: &[usize]) -> Self {
        let mut shape = self.shape;
        shape[dim] = positions.len();
        Self::with(shape, |mut at| {
            at[dim] = positions[at[dim]];
            self.at(at)
        })
    }

    /// Zero but at these positions of a dimension.
    fn only(&self, dim: usize, positions: &[usize]) -> Self {
        Self::with(
            self.shape,
            |at| if positions.contains(&at[dim]) { self.at(at) } else { 0.0 },
        )
    }

    fn at(&self, at: [usize; 3]) -> f64 {
        self.values[(at[0] * self.shape[1] + at[1]) * self.shape[2] + at[2]]
    }
}

/// Who owns which positions of a dimension: the definition, written again from design.md.
fn owned(split: &Split, len: usize, size: usize, rank: usize) -> Vec<usize> {
    let part = |len: usize, size: usize, rank: usize| {
        let start = |rank: usize| len / size * rank + rank.min(len % size);
        start(rank)..start(rank + 1)
    };
    let contiguous = |size: usize, rank: usize| part(len, size, rank);
    match split {
        Split::Contiguous => contiguous(size, rank).collect(),
        Split::Halves => {
            let (half, rest) = (len / 2, len - len / 2);
            let second = part(rest, size, rank).map(|at| half + at);
            part(half, size, rank).chain(second).collect()
        }
        Split::Zigzag => contiguous(2 * size, rank)
            .chain(contiguous(2 * size, 2 * size - 1 - rank))
            .collect(),
        Split::Explicit(parts) => parts.of(rank).iter().cloned().flatten().collect(),
    }
}

/// Round robin, the last rank first.
fn explicit(len: usize, size: usize) -> Split {
    let of = |rank: usize| {
        (0..len)
            .filter(|at| at % size == size - 1 - rank)
            .map(|at| at..at + 1)
            .collect()
    };
    Split::Explicit(Parts::new((0..size).map(of).collect()))
}

fn places(shape: [usize; 3], size: usize) -> Vec<Place> {
    let splits = |dim: usize| {
        [
            Split::Contiguous,
            Split::Zigzag,
            Split::Halves,
            explicit(shape[dim], size),
        ]
    };
    let mut all: Vec<Place> = (0..3)
        .flat_map(|dim| splits(dim).into_iter().map(move |split| Place::Shard(dim, split)))
        .collect();
    all.extend([Place::Replicate, Place::Partial]);
    all
}

/// What rank `rank` holds of a whole tensor. The terms of a partial one are 1, 2, 3.. times `whole / (1 + 2 + ..)`.
fn held(whole: &Whole, place: &Place, size: usize, rank: usize) -> Whole {
    match place {
        Place::Shard(dim, split) => whole.select(*dim, &owned(split, whole.shape[*dim], size, rank)),
        Place::Replicate => whole.clone(),
        Place::Partial => whole.scaled((rank + 1) as f64 / terms(size)),
    }
}

/// 1 + 2 + .. + size.
fn terms(size: usize) -> f64 {
    (size * (size + 1) / 2) as f64
}

/// What a rank must hold after a change of placement: the table of design.md.
fn after(whole: &Whole, from: &Place, to: &Place, size: usize, rank: usize) -> Whole {
    match (from, to) {
        (Place::Partial, Place::Partial) => held(whole, from, size, rank),
        // Own slice, zeros elsewhere.
        (Place::Shard(dim, split), Place::Partial) => whole.only(*dim, &owned(split, whole.shape[*dim], size, rank)),
        // One rank keeps it.
        (Place::Replicate, Place::Partial) => whole.scaled(if rank == 0 { 1.0 } else { 0.0 }),
        _ => held(whole, to, size, rank),
    }
}

fn change<K: burn_sp::SpKind>(tensor: SpTensor<3, K>, to: &Place) -> SpTensor<3, K> {
    match to {
        Place::Shard(dim, split) => tensor.shard(AXIS, *dim, split.clone()),
        Place::Replicate => tensor.redistribute(AXIS, Placement::Replicate),
        Place::Partial => tensor.redistribute(AXIS, Placement::Partial),
    }
}

fn floats(whole: &Whole, device: &Device) -> Tensor<3> {
    common::tensor(&whole.values, whole.shape, DType::F32, device)
}

fn shapes(lengths: impl IntoIterator<Item = usize>) -> Vec<[usize; 3]> {
    // Two lengths that run against each other, and one that divides nothing.
    lengths.into_iter().map(|len| [len, 9 - len, 3]).collect()
}

fn cases() -> Vec<(usize, Vec<[usize; 3]>)> {
    if common::device() != Device::flex() {
        // A launch takes a hundred times as long as so small a copy.
        return vec![(2, shapes([0, 7])), (3, shapes([2, 5]))];
    }
    let mut cases: Vec<_> = (1..=5).map(|size| (size, shapes(0..=9))).collect();
    cases.push((8, shapes([2, 7])));
    cases
}

/// Calls `check(device, shape, from, to)` for every pair of placements, lengths and numbers of ranks.
fn everywhere(check: impl Fn(&SpDevice, [usize; 3], &Place, &Place) + Send + Sync) {
    for (size, shapes) in cases() {
        ranks(MeshShape::ulysses(size), |device| {
            for shape in &shapes {
                let places = places(*shape, size);
                for from in &places {
                    for to in &places {
                        check(&device, *shape, from, to);
                    }
                }
            }
        });
    }
}

#[test]
fn every_change_of_floats() {
    everywhere(|device, shape, from, to| {
        let (size, rank) = (device.mesh().size(AXIS), device.rank());
        let whole = Whole::coordinates(shape).scaled(terms(size));
        let local = floats(&held(&whole, from, size, rank), device.device());
        let after_change = change(SpTensor::from_local(local, from.layout(shape), device), to);
        let expected = after(&whole, from, to, size, rank);
        let context = format!("rank {rank} of {size}, {shape:?}, {from:?} -> {to:?}");
        assert_eq!(*after_change.layout(), to.layout(shape), "{context}");
        assert_eq!(after_change.local().dims(), expected.shape, "{context}");
        assert_eq!(f64s(after_change.local()), expected.values, "{context}");
    });
}

#[test]
fn every_gradient_goes_through_the_dual_change() {
    everywhere(|device, shape, from, to| {
        let (size, rank) = (device.mesh().size(AXIS), device.rank());
        let local = held(&Whole::coordinates(shape).scaled(terms(size)), from, size, rank);
        let leaf = floats(&local, device.device()).require_grad();
        let out = change(SpTensor::from_local(leaf.clone(), from.layout(shape), device), to);
        // The gradient that arrives lies in the dual layout; where it is partial, every rank has another term.
        let gradient = Whole::with(shape, |at| (7 * at[0] + 3 * at[1] + at[2]) as f64 - 11.0).scaled(terms(size));
        let arriving = floats(&held(&gradient, &to.dual(), size, rank), device.device());
        let grads = (out.local().clone() * arriving).sum().backward();
        let expected = after(&gradient, &to.dual(), &from.dual(), size, rank);
        let found = leaf.grad(&grads).expect("every rank's leaf has a gradient");
        let context = format!("rank {rank} of {size}, {shape:?}, backward of {from:?} -> {to:?}");
        assert_eq!(found.dims(), expected.shape, "{context}");
        assert_eq!(f64s(&found), expected.values, "{context}");
    });
}

#[test]
fn every_change_of_integers() {
    everywhere(|device, shape, from, to| {
        let (size, rank) = (device.mesh().size(AXIS), device.rank());
        let whole = Whole::coordinates(shape).scaled(terms(size));
        let local = held(&whole, from, size, rank);
        let integers: Vec<i64> = local.values.iter().map(|x| *x as i64).collect();
        let local = Tensor::<3, Int>::from_data(TensorData::new(integers, local.shape), device.device());
        let out = change(SpTensor::from_local(local, from.layout(shape), device), to);
        let found: Vec<f64> = out.local().to_data().iter::<f64>().collect();
        let expected = after(&whole, from, to, size, rank);
        assert_eq!(
            found, expected.values,
            "rank {rank} of {size}, {shape:?}, {from:?} -> {to:?}"
        );
    });
}

/// A partial boolean is an "or": here every rank knows the elements whose number is its own, modulo the ranks.
#[test]
fn every_change_of_booleans() {
    everywhere(|device, shape, from, to| {
        let (size, rank) = (device.mesh().size(AXIS), device.rank());
        let number = |at: [usize; 3]| 5 * at[0] + 3 * at[1] + at[2];
        let whole = Whole::with(shape, |at| f64::from(u8::from(number(at) % 4 < 2)));
        let mine = Whole::with(shape, |at| if number(at) % size == rank { whole.at(at) } else { 0.0 });
        let partial = *from == Place::Partial;
        let local = if partial {
            mine.clone()
        } else {
            held(&whole, from, size, rank)
        };
        let booleans: Vec<bool> = local.values.iter().map(|x| *x == 1.0).collect();
        let local = Tensor::<3, Bool>::from_data(TensorData::new(booleans, local.shape), device.device());
        let out = change(SpTensor::from_local(local, from.layout(shape), device), to);
        let found: Vec<f64> = out
            .local()
            .to_data()
            .iter::<bool>()
            .map(|x| f64::from(u8::from(x)))
            .collect();
        let expected = if partial && *to == Place::Partial {
            mine
        } else {
            after(&whole, from, to, size, rank)
        };
        assert_eq!(
            found, expected.values,
            "rank {rank} of {size}, {shape:?}, {from:?} -> {to:?}"
        );
    });
}

/// Case 15: views with other strides through every collective and its backward.
#[test]
fn strided_views_change_like_contiguous_tensors() {
    let size = 3;
    ranks(MeshShape::ulysses(size), |device| {
        let rank = device.rank();
        for shape in shapes([2, 4, 7]) {
            // The value does not depend on the last dimension, so that it can be an expanded one.
            let whole = Whole::with(shape, |at| (10 * at[0] + at[1]) as f64).scaled(terms(size));
            let places = places(shape, size);
            for from in &places {
                let local = held(&whole, from, size, rank);
                for (name, view) in views(&local, device.device()) {
                    for to in &places {
                        let context = format!("rank {rank}, {shape:?}, {name}, {from:?} -> {to:?}");
                        let view = view.clone().require_grad();
                        let out = change(SpTensor::from_local(view.clone(), from.layout(shape), &device), to);
                        assert_eq!(
                            f64s(out.local()),
                            after(&whole, from, to, size, rank).values,
                            "{context}"
                        );
                        // Behind a transposition the gradient arrives transposed.
                        let arriving = held(&whole, &to.dual(), size, rank);
                        let turned = out.local().clone().swap_dims(0, 2);
                        let grads = (turned * floats(&arriving, device.device()).swap_dims(0, 2))
                            .sum()
                            .backward();
                        let expected = after(&whole, &to.dual(), &from.dual(), size, rank);
                        assert_eq!(
                            f64s(&view.grad(&grads).expect("a gradient")),
                            expected.values,
                            "{context}"
                        );
                    }
                }
            }
        }
    });
}

/// The same values three times: transposed, a slice of something larger, and expanded along the last dimension, on which
/// they must not depend.
fn views(local: &Whole, device: &Device) -> Vec<(&'static str, Tensor<3>)> {
    let [a, b, c] = local.shape;
    let transposed = Whole::with([c, b, a], |at| local.at([at[2], at[1], at[0]]));
    let larger = Whole::with([a + 2, b + 1, c + 1], |at| match at {
        [i, j, k] if (1..=a).contains(&i) && j < b && k >= 1 => local.at([i - 1, j, k - 1]),
        _ => f64::NAN,
    });
    let mut views = vec![
        ("transposed", floats(&transposed, device).swap_dims(0, 2)),
        ("sliced", floats(&larger, device).slice([1..a + 1, 0..b, 1..c + 1])),
    ];
    // Burn expands nothing to a length of 0; a rank that owns nothing still has to take part as often as the others.
    views.push(match a * b * c {
        0 => ("empty", floats(local, device)),
        _ => ("expanded", floats(&local.select(2, &[0]), device).expand([a, b, c])),
    });
    views
}

/// Case 14: tokens for heads, with every buffer written out from its coordinates.
#[test]
fn tokens_for_heads_in_both_orders() {
    let value = |b: usize, s: usize, h: usize, d: usize| 1e6 * b as f64 + 1e4 * s as f64 + 100.0 * h as f64 + d as f64;
    let buffers = |bs: [usize; 2], token_dim: usize, scope: [std::ops::Range<usize>; 2]| {
        // Rows of the local buffer [x, y, heads, d], where the token dimension is x or y.
        let [tokens, heads] = scope;
        let mut buffer = Vec::new();
        let (outer, inner) = match token_dim {
            0 => (tokens.clone(), 0..bs[0]),
            _ => (0..bs[0], tokens.clone()),
        };
        for x in outer {
            for y in inner.clone() {
                let (b, s) = if token_dim == 0 { (y, x) } else { (x, y) };
                for h in heads.clone() {
                    buffer.extend((0..3).map(|d| value(b, s, h, d)));
                }
            }
        }
        buffer
    };
    for token_dim in [1, 0] {
        let shape = if token_dim == 1 { [2, 4, 4, 3] } else { [4, 2, 4, 3] };
        let whole = buffers([2, 4], token_dim, [0..4, 0..4]);
        ranks(MeshShape::ulysses(2), |device| {
            let layout = Layout::replicated(shape).shard(token_dim, AXIS, Split::Contiguous);
            let x = common::tensor(&whole, shape, DType::F32, device.device());
            let by_tokens = device.distribute(x, &layout);
            let (start, rank) = (2 * device.rank(), device.rank());
            let expected = buffers([2, 4], token_dim, [start..start + 2, 0..4]);
            assert_eq!(f64s(by_tokens.local()), expected, "rank {rank}, token dim {token_dim}");
            let by_heads = by_tokens.redistribute(AXIS, Placement::Shard(2));
            let expected = buffers([2, 4], token_dim, [0..4, start..start + 2]);
            assert_eq!(f64s(by_heads.local()), expected, "rank {rank}, token dim {token_dim}");
            let again = by_heads.redistribute(AXIS, Placement::Shard(token_dim));
            let expected = buffers([2, 4], token_dim, [start..start + 2, 0..4]);
            assert_eq!(f64s(again.local()), expected, "rank {rank}, token dim {token_dim}");
        });
    }
}

/// Case 16: also for a video whose tokens a grid of (3, 2, 2) unrolls to.
#[test]
fn a_sliced_tensor_gets_each_gradient_once() {
    for size in 1..=5 {
        for split in [Split::Contiguous, Split::Zigzag] {
            ranks(MeshShape::ulysses(size), |device| {
                let grid = Tensor::<4>::ones([3, 2, 2, 2], device.device()).require_grad();
                let layout = Layout::replicated([12, 2]).shard(0, AXIS, split.clone());
                let mine = device.distribute(grid.clone().reshape([12, 2]), &layout);
                let grads = mine.local().clone().sum().backward();
                let term = grid.grad(&grads).expect("a gradient");
                let gathered = SpTensor::from_local(term, Layout::replicated([3, 2, 2, 2]).partial(AXIS), &device)
                    .redistribute(AXIS, Placement::Replicate);
                assert_eq!(f64s(gathered.local()), [1.0; 24]);
            });
        }
    }
}

const NESTED: MeshShape = MeshShape {
    dp: 1,
    ring: 2,
    ulysses: 2,
    tp: 1,
};

fn nested(device: &SpDevice) -> SpTensor<1> {
    let whole = Tensor::<1>::from_floats([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], device.device());
    let layout = Layout::replicated([8])
        .shard(0, Axis::Ring, Split::Zigzag)
        .shard(0, Axis::Ulysses, Split::Contiguous);
    device.distribute(whole, &layout)
}

#[test]
fn an_inner_axis_splits_the_outer_owners_list() {
    let found = ranks(NESTED, |device| {
        let own = nested(&device);
        let positions: Vec<f64> = own.positions(0).iter().map(|at| at as f64).collect();
        assert_eq!(f64s(own.local()), positions);
        let outer = own.clone().redistribute(Axis::Ulysses, Placement::Replicate);
        let whole = outer.clone().redistribute(Axis::Ring, Placement::Replicate);
        (f64s(own.local()), f64s(outer.local()), f64s(whole.local()))
    });
    let own = [[0.0, 1.0], [6.0, 7.0], [2.0, 3.0], [4.0, 5.0]];
    let outer = [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 4.0, 5.0]];
    for (rank, found) in found.into_iter().enumerate() {
        assert_eq!(found.0, own[rank], "rank {rank}");
        assert_eq!(found.1, outer[rank / 2], "rank {rank}: the outer owner's order");
        assert_eq!(
            found.2,
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            "rank {rank}: ascending order"
        );
    }
}

/// Ring and ulysses on the tokens, tp on the heads, with lengths that divide nothing: ulysses moves to the heads and back,
/// inside tp, and all of it has gradient 1 of each element once.
#[test]
fn axes_nest_on_two_dims_of_uneven_length() {
    let mesh = MeshShape { tp: 2, ..NESTED };
    for split in [Split::Contiguous, Split::Zigzag] {
        ranks(mesh, |device| {
            let value = |s: usize, h: usize| (100 * s + h) as f64;
            let values: Vec<f64> = (0..11).flat_map(|s| (0..7).map(move |h| value(s, h))).collect();
            let layout = Layout::replicated([11, 7])
                .shard(0, Axis::Ring, split.clone())
                .shard(0, Axis::Ulysses, split.clone())
                .shard(1, Axis::Tp, Split::Contiguous);
            let leaf = common::tensor(&values, [11, 7], DType::F32, device.device()).require_grad();
            let check = |x: &SpTensor<2>| {
                let expected: Vec<f64> = x
                    .positions(0)
                    .iter()
                    .flat_map(|s| x.positions(1).iter().map(move |h| value(s, h)).collect::<Vec<_>>())
                    .collect();
                assert_eq!(f64s(x.local()), expected, "rank {}: {}", device.rank(), x.layout());
            };
            let by_tokens = device.distribute(leaf.clone(), &layout);
            check(&by_tokens);
            let by_heads = by_tokens.clone().shard(Axis::Ulysses, 1, split.clone());
            check(&by_heads);
            let back = by_heads.clone().shard(Axis::Ulysses, 0, split.clone());
            check(&back);
            assert_eq!(back.layout(), by_tokens.layout());
            let whole = by_heads.gather();
            check(&whole);
            // Every rank uses the whole value with weight 1, so each element's gradient is the number of ranks.
            let grads = whole.local().clone().sum().backward();
            let term = leaf.grad(&grads).expect("a gradient");
            let sum = [Axis::Ring, Axis::Ulysses, Axis::Tp]
                .into_iter()
                .fold(Layout::replicated([11, 7]), Layout::partial);
            assert_eq!(
                f64s(SpTensor::from_local(term, sum, &device).gather().local()),
                [8.0; 77]
            );
        });
    }
}

#[test]
fn an_outer_axis_does_not_move() {
    type Way = fn(SpTensor<1>) -> SpTensor<1>;
    let ways: [(&str, Way); 3] = [
        ("redistribute", |x| x.redistribute(Axis::Ring, Placement::Replicate)),
        ("redistribute", |x| x.redistribute(Axis::Ring, Placement::Partial)),
        ("shard", |x| x.shard(Axis::Ring, 0, Split::Contiguous)),
    ];
    for (operation, way) in ways {
        let report = failure(NESTED, |device| drop(way(nested(&device))));
        contains(
            &report,
            &[
                operation,
                "ring is not the innermost axis on dimension 0 of [8 / ring zigzag / ulysses]",
                "redistribute ulysses first",
                "transitions.rs",
            ],
        );
    }
}

/// The whole table costs what it says: one collective or none, under the name of its axis.
#[test]
fn each_change_is_one_collective_or_none() {
    let shard = |dim| Place::Shard(dim, Split::Contiguous);
    let table = [
        (shard(0), Place::Replicate, Some("all_gather"), Some("reduce_scatter")),
        (Place::Partial, shard(0), Some("reduce_scatter"), Some("all_gather")),
        (Place::Partial, Place::Replicate, Some("all_reduce"), Some("all_reduce")),
        (shard(0), shard(1), Some("all_to_all"), Some("all_to_all")),
        (
            shard(0),
            Place::Shard(0, Split::Zigzag),
            Some("all_to_all"),
            Some("all_to_all"),
        ),
        (Place::Replicate, shard(0), None, None),
        (shard(0), Place::Partial, None, None),
        (Place::Replicate, Place::Partial, None, None),
    ];
    ranks(MeshShape::ulysses(4), |device| {
        let shape = [8, 4, 2];
        for (from, to, forward, backward) in &table {
            let local = held(&Whole::coordinates(shape), from, 4, device.rank());
            let leaf = floats(&local, device.device()).require_grad();
            let x = SpTensor::from_local(leaf, from.layout(shape), &device);
            let world = device.mesh().world();
            let calls = |expected: &Option<&str>| {
                let counters = world.statistics().into_iter().filter(|counter| counter.calls > 0);
                let found: Vec<_> = counters
                    .map(|counter| (counter.op, counter.axis, counter.calls))
                    .collect();
                let expected: Vec<_> = expected
                    .iter()
                    .map(|op| (op.to_string(), "ulysses".to_owned(), 1))
                    .collect();
                assert_eq!(found, expected, "{from:?} -> {to:?}");
                world.reset_statistics();
            };
            world.reset_statistics();
            let out = change(x, to);
            calls(forward);
            out.local().clone().sum().backward();
            calls(backward);
        }
    });
}

/// Case 24: positions are global, whatever the split; a video's are its tokens' indices, un-flattened.
#[test]
fn positions_are_global() {
    let owned = |size: usize, length: usize, split: Split| {
        ranks(MeshShape::ring(size), |device| {
            let layout = Layout::replicated([length]).shard(0, Axis::Ring, split.clone());
            let tokens = device.distribute(Tensor::<1>::zeros([length], device.device()), &layout);
            tokens.positions(0).iter().collect::<Vec<_>>()
        })
    };
    assert_eq!(owned(2, 8, Split::Zigzag), [[0, 1, 6, 7], [2, 3, 4, 5]]);
    assert_eq!(owned(2, 8, Split::Halves), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    assert_eq!(owned(2, 7, Split::Halves), [vec![0, 1, 3, 4], vec![2, 5, 6]]);

    // A grid of 2 frames, 2 rows and 3 columns.
    let unflatten = |index: usize| [index / 6, index / 3 % 2, index % 3];
    let rows = [[0, 0], [0, 1], [1, 0], [1, 1]];
    for (rank, owned) in owned(4, 12, Split::Contiguous).into_iter().enumerate() {
        let [frame, row] = rows[rank];
        let expected = [[frame, row, 0], [frame, row, 1], [frame, row, 2]];
        assert_eq!(
            owned.into_iter().map(unflatten).collect::<Vec<_>>(),
            expected,
            "rank {rank}"
        );
    }
}
