//! What is refused, with the message that a user gets: the operation, the layouts, and what would work.

mod common;

use burn::module::{Param, ParamId};
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_sp::attention::{AttentionOptions, attention};
use burn_sp::comm::Parts;
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::train::{LossShare, token_loss, valid_tokens};
use burn_sp::{LaunchConfig, SpDevice, SpTensor, launch};
use common::{contains, failure, ranks};

const TWO: MeshShape = MeshShape {
    dp: 1,
    ring: 1,
    ulysses: 2,
    tp: 1,
};
const FIRST: &str = "add them first with .redistribute(Axis::Ulysses, Placement::Replicate) or \
                     .redistribute(Axis::Ulysses, Placement::Shard(0))";

fn whole(device: &SpDevice) -> SpTensor<2> {
    SpTensor::replicated(Tensor::ones([4, 2], device.device()), device)
}

fn sharded(device: &SpDevice) -> SpTensor<2> {
    whole(device).redistribute(Axis::Ulysses, Placement::Shard(0))
}

fn partial(device: &SpDevice) -> SpTensor<2> {
    whole(device).redistribute(Axis::Ulysses, Placement::Partial)
}

/// The body fails on two ranks with a report that has all these words and names this file.
#[track_caller]
fn refused(words: &[&str], body: impl Fn(SpDevice) + Send + Sync) {
    let report = failure(TWO, body);
    contains(&report, words);
    contains(&report, &["panicked at", "refusals.rs"]);
}

#[test]
fn token_wise_work_on_a_partial_value() {
    refused(
        &[
            "tokenwise: the value [4, 2] partial over ulysses is a sum of terms that its ranks still hold apart",
            FIRST,
        ],
        |device| {
            let linear = LinearConfig::new(2, 2).init(device.device());
            drop(partial(&device).tokenwise(|x| linear.forward(x)));
        },
    );
}

/// Case 13 and its neighbours: a partial value does not become a number unnoticed.
#[test]
fn leaving_the_layout_of_a_partial_value() {
    refused(
        &["into_local: the value [4, 2] partial over ulysses", FIRST],
        |device| {
            drop(partial(&device).into_local());
        },
    );
    for axes in [vec![], vec![Axis::Ring], vec![Axis::Ulysses, Axis::Dp]] {
        refused(
            &[
                "into_partial_term: [4, 2] partial over ulysses was named as a sum over",
                "name exactly the axes over which it is partial",
            ],
            |device| drop(partial(&device).into_partial_term(&axes)),
        );
    }
    refused(
        &["into_partial_term: [4 / ulysses, 2] was named as a sum over [Ulysses]"],
        |device| {
            drop(sharded(&device).into_partial_term(&[Axis::Ulysses]));
        },
    );
    let terms = ranks(TWO, |device| {
        common::f64s(&partial(&device).into_partial_term(&[Axis::Ulysses]))
    });
    assert_eq!(terms, [[1.0; 8], [0.0; 8]], "named, it is allowed");
}

#[test]
fn adding_to_a_partial_value() {
    let helps = "add up the partial value first with .redistribute(Axis::Ulysses, Placement::Replicate), or make the other \
                 a term with .redistribute(Axis::Ulysses, Placement::Partial)";
    refused(
        &["add: [4, 2] added to a partial value would count 2 times", helps],
        |device| {
            drop(partial(&device).add(whole(&device)));
        },
    );
    refused(
        &["add: [4, 2] added to a partial value would count 2 times", helps],
        |device| {
            drop(whole(&device).add(partial(&device)));
        },
    );
    refused(
        &["sub: [4, 2] added to a partial value would count 2 times"],
        |device| {
            drop(partial(&device).sub(whole(&device)));
        },
    );
    refused(
        &["add: the layouts [4, 2] partial over ulysses and [4 / ulysses, 2] differ"],
        |device| {
            drop(partial(&device).add(sharded(&device)));
        },
    );
    refused(&["add_scalar: the value [4, 2] partial over ulysses"], |device| {
        drop(partial(&device).add_scalar(1.0));
    });
    refused(
        &[
            "add: the layouts [4 / ulysses, 2] and [4 / ulysses zigzag, 2] differ",
            "redistribute one of them",
        ],
        |device| {
            drop(sharded(&device).add(whole(&device).shard(Axis::Ulysses, 0, Split::Zigzag)));
        },
    );
    // What commutes with a sum is allowed, and right.
    let sums = ranks(TWO, |device| {
        let sum = partial(&device)
            .add(partial(&device))
            .mul_scalar(3.0)
            .mul(whole(&device).mul_scalar(2.0));
        common::f64s(&sum.swap_dims(0, 1).gather().into_local())
    });
    assert_eq!(sums, [[12.0; 8]; 2]);
}

#[test]
fn products_of_partial_values() {
    refused(
        &[
            "mul: [4, 2] partial over ulysses with [4, 2] partial over ulysses: beside a partial factor the other must be \
             replicated over ulysses",
            "add up the partial one first with .redistribute(Axis::Ulysses, Placement::Replicate)",
        ],
        |device| drop(partial(&device).mul(partial(&device))),
    );
    refused(
        &["matmul: [4, 2] partial over ulysses with", "beside a partial factor"],
        |device| {
            drop(partial(&device).matmul(partial(&device).swap_dims(0, 1)));
        },
    );
    refused(
        &["mul: the layouts [4, 2] partial over ulysses and [4 / ulysses, 2] differ"],
        |device| {
            drop(partial(&device).mul(sharded(&device)));
        },
    );
    refused(
        &[
            "matmul: [4, 2] partial over ulysses with [2, 4 / ulysses]",
            "beside a partial factor",
        ],
        |device| {
            drop(partial(&device).matmul(sharded(&device).swap_dims(0, 1)));
        },
    );
}

#[test]
fn matrix_products_that_do_not_meet() {
    refused(
        &[
            "matmul: [4, 2] with [4, 2] do not meet",
            "the shapes must be [..., m, k] and [..., k, n]",
        ],
        |device| {
            drop(whole(&device).matmul(whole(&device)));
        },
    );
    refused(
        &[
            "matmul: [4 / ulysses, 2] with [2, 4 / ulysses] do not meet",
            "rows of the left or the columns of the right",
        ],
        |device| drop(sharded(&device).matmul(sharded(&device).swap_dims(0, 1))),
    );
    refused(
        &[
            "matmul: [2, 4 / ulysses] with [4, 2] do not meet",
            "contracted dimensions must be sharded alike",
        ],
        |device| {
            drop(sharded(&device).swap_dims(0, 1).matmul(whole(&device)));
        },
    );
    // Sharded alike, the product is partial, and its sum is right.
    let products = ranks(TWO, |device| {
        let product = sharded(&device).swap_dims(0, 1).matmul(sharded(&device));
        assert_eq!(product.layout().partial_axes(), [Axis::Ulysses]);
        common::f64s(&product.gather().into_local())
    });
    assert_eq!(products, [[4.0; 4]; 2]);
}

#[test]
fn token_wise_work_that_is_not() {
    refused(
        &[
            "tokenwise: dimension 0 of [4 / ulysses, 2] is sharded, and [2, 2] became [1, 2]",
            "keep sharded dimensions where they are and as long as they are, or gather them first",
        ],
        |device| drop(sharded(&device).tokenwise(|x| x.sum_dim(0))),
    );
    refused(&["tokenwise: dimension 0", "[2, 2] became [4]"], |device| {
        drop(sharded(&device).tokenwise::<1, _>(|x| x.reshape([4])));
    });
}

#[test]
fn local_tensors_of_the_wrong_shape() {
    refused(
        &[
            "from_local: the local tensor is [3, 2]; rank ",
            "of [5 / ulysses, 2] holds [",
        ],
        |device| {
            let layout = Layout::replicated([5, 2]).shard(0, Axis::Ulysses, Split::Contiguous);
            let rows = if device.rank() == 0 { 4 } else { 3 };
            drop(SpTensor::from_local(
                Tensor::<2>::ones([rows.min(3), 2], device.device()),
                layout.clone(),
                &device,
            ));
            drop(SpTensor::from_local(
                Tensor::<2>::ones([3, 2], device.device()),
                layout,
                &device,
            ));
        },
    );
    refused(
        &["distribute: the tensor is [4, 2], the layout [6 / ulysses, 2]"],
        |device| {
            let layout = Layout::replicated([6, 2]).shard(0, Axis::Ulysses, Split::Contiguous);
            drop(device.distribute(Tensor::<2>::ones([4, 2], device.device()), &layout));
        },
    );
    refused(
        &["distribute: a whole value cannot become [4, 2] partial over ulysses"],
        |device| {
            let layout = Layout::replicated([4, 2]).partial(Axis::Ulysses);
            drop(device.distribute(Tensor::<2>::ones([4, 2], device.device()), &layout));
        },
    );
}

#[test]
fn layouts_that_cannot_be() {
    refused(&["shard: [4, 2] has no dimension 2; use 0..2"], |device| {
        drop(whole(&device).redistribute(Axis::Ulysses, Placement::Shard(2)));
    });
    let explicit = |ranges: Vec<Vec<std::ops::Range<usize>>>| Split::Explicit(Parts::new(ranges));
    for (split, message) in [
        (
            explicit(vec![vec![0..2], vec![3..4]]),
            "split: explicit parts own position 2 nowhere",
        ),
        (
            explicit(vec![vec![0..2], vec![1..4]]),
            "split: explicit parts own position 1 twice",
        ),
        (
            explicit(vec![vec![0..2], vec![2..3]]),
            "split: explicit parts cover 3 positions, the dimension has 4",
        ),
        (
            explicit(vec![vec![0..4]]),
            "split: explicit parts are for 1 ranks, the axis has 2",
        ),
    ] {
        let report = failure(TWO, |device| {
            drop(whole(&device).shard(Axis::Ulysses, 0, split.clone()))
        });
        contains(&report, &[message]);
    }
    let report = failure(TWO, |device| {
        drop(
            sharded(&device)
                .layout()
                .clone()
                .shard(1, Axis::Ulysses, Split::Contiguous),
        );
    });
    contains(
        &report,
        &["layout: ulysses already holds [4 / ulysses, 2]; one axis has one placement"],
    );
}

/// A mesh that cannot be made is refused before any rank starts.
#[test]
fn meshes_that_cannot_be() {
    let config = LaunchConfig::new(MeshShape { tp: 0, ..TWO });
    let started = |_: SpDevice| panic!("a rank has started");
    let error = launch::<(), _, _>(&config, &Device::flex(), started)
        .unwrap_err()
        .to_string();
    assert_eq!(error, "mesh: tp is 0; leave the axis out or give it at least 1 rank");
    assert_eq!(
        TWO.check(3).unwrap_err().to_string(),
        "mesh: ulysses 2 needs 2 ranks, but 3 were given; make the product of the axes equal the ranks"
    );
}

fn qkv(device: &SpDevice, shape: [usize; 4], layout: impl Fn(Layout) -> Layout) -> SpTensor<4> {
    device.distribute(Tensor::ones(shape, device.device()), &layout(Layout::replicated(shape)))
}

/// Cases 18 and 22: attention on a layout that no strategy serves is refused, never done on the local tokens alone.
#[test]
fn attention_without_a_strategy() {
    let tokens = |axis| move |layout: Layout| layout.shard(1, axis, Split::Contiguous);
    let shape = [2, 4, 2, 2];
    let call = |q: SpTensor<4>, k: SpTensor<4>, v: SpTensor<4>| drop(attention(q, k, v, &AttentionOptions::default()));
    for axis in [Axis::Dp, Axis::Tp] {
        let mesh = MeshShape {
            dp: if axis == Axis::Dp { 2 } else { 1 },
            tp: if axis == Axis::Tp { 2 } else { 1 },
            ..MeshShape::default()
        };
        let report = failure(mesh, |device| {
            let x = qkv(&device, shape, tokens(axis));
            call(x.clone(), x.clone(), x);
        });
        contains(
            &report,
            &[
                &format!(
                    "attention: no strategy for {axis} on [2, 4 / {axis}, 2, 2], which is [batch, tokens, heads, head_dim]"
                ),
                "shard tokens over Ring and Ulysses, heads over Tp or Ulysses, samples over any axis",
                "refusals.rs",
            ],
        );
    }
    refused(
        &["attention: no strategy for ulysses on [2, 4, 2, 2 / ulysses]"],
        |device| {
            let x = qkv(&device, shape, |layout| {
                layout.shard(3, Axis::Ulysses, Split::Contiguous)
            });
            call(x.clone(), x.clone(), x);
        },
    );
    refused(
        &["attention: the value [2, 4, 2, 2] partial over ulysses is a sum of terms"],
        |device| {
            let x = qkv(&device, shape, |layout| layout);
            call(x.clone().redistribute(Axis::Ulysses, Placement::Partial), x.clone(), x);
        },
    );
    let alike = "shard all three alike, or give keys and values whole";
    refused(&["are sharded differently", alike], |device| {
        let q = qkv(&device, shape, tokens(Axis::Ulysses));
        let k = qkv(&device, shape, |layout| layout.shard(1, Axis::Ulysses, Split::Zigzag));
        call(q, k.clone(), k);
    });
    refused(&["are sharded differently", alike], |device| {
        let (q, k) = (
            qkv(&device, shape, |layout| layout),
            qkv(&device, shape, tokens(Axis::Ulysses)),
        );
        call(q, k.clone(), k);
    });
    refused(&["are sharded differently", alike], |device| {
        let x = qkv(&device, shape, tokens(Axis::Ulysses));
        let v = qkv(&device, shape, |layout| layout);
        call(x.clone(), x, v);
    });
    let report = failure(common::mesh(2, 1, 1), |device| {
        let samples = |layout: Layout| layout.shard(0, Axis::Dp, Split::Contiguous);
        let (q, k) = (qkv(&device, shape, samples), qkv(&device, shape, |layout| layout));
        call(q, k.clone(), k);
    });
    contains(
        &report,
        &[
            "samples of q [2 / dp, 4, 2, 2], k [2, 4, 2, 2] and v [2, 4, 2, 2] are sharded differently",
            "shard the first dimension of all three alike",
        ],
    );
    // Ulysses outside and ring inside is not the order that the strategies nest in.
    let report = failure(common::mesh(1, 2, 2), |device| {
        let x = qkv(&device, shape, |layout| {
            layout
                .shard(1, Axis::Ulysses, Split::Contiguous)
                .shard(1, Axis::Ring, Split::Contiguous)
        });
        call(x.clone(), x.clone(), x);
    });
    contains(
        &report,
        &["shard tokens over Ring, over Ulysses, or over Ring and inside it Ulysses"],
    );
}

#[test]
fn attention_of_shapes_that_do_not_fit() {
    let call = |device: &SpDevice, q, k, v| {
        let [q, k, v] = [q, k, v].map(|shape| qkv(device, shape, |layout| layout));
        drop(attention(q, k, v, &AttentionOptions::default()));
    };
    refused(
        &["attention: 6 query heads cannot share 4 key/value heads; the query heads must be a multiple"],
        |device| {
            call(&device, [1, 4, 6, 2], [1, 4, 4, 2], [1, 4, 4, 2]);
        },
    );
    refused(
        &["attention: q [1, 4, 2, 2], k [1, 4, 2, 3] and v [1, 4, 2, 2] do not fit"],
        |device| {
            call(&device, [1, 4, 2, 2], [1, 4, 2, 3], [1, 4, 2, 2]);
        },
    );
    refused(
        &["attention: q [1, 4, 2, 2], k [1, 4, 2, 2] and v [1, 5, 2, 2] do not fit"],
        |device| {
            call(&device, [1, 4, 2, 2], [1, 4, 2, 2], [1, 5, 2, 2]);
        },
    );
}

/// Case 26: the other half, 6 heads on 4 ranks, works; see attention_sharded.rs.
#[test]
fn losses_of_the_wrong_layout() {
    refused(
        &["LossShare::new: the value [4, 2] partial over ulysses", FIRST],
        |device| {
            drop(LossShare::new(partial(&device), 8));
        },
    );
    refused(&["LossShare::new: the value [4, 2] partial over ulysses"], |device| {
        drop(LossShare::mean(partial(&device)));
    });
    let labels = |device: &SpDevice, split: Split| {
        let layout = Layout::replicated([1, 4]).shard(1, Axis::Ulysses, split);
        device.distribute(Tensor::<2, Int>::zeros([1, 4], device.device()), &layout)
    };
    let hidden = |device: &SpDevice| {
        let layout = Layout::replicated([1, 4, 3]).shard(1, Axis::Ulysses, Split::Contiguous);
        device.distribute(Tensor::<3>::ones([1, 4, 3], device.device()), &layout)
    };
    refused(
        &[
            "token_loss: hidden is [1, 4 / ulysses, 3] and the labels or weights [1, 4 / ulysses zigzag]",
            "shard batch and tokens of all alike",
        ],
        |device| {
            let weight = Tensor::ones([3, 5], device.device());
            drop(token_loss(
                hidden(&device),
                weight,
                &labels(&device, Split::Zigzag),
                None,
                4,
            ));
        },
    );
    refused(
        &[
            "valid_tokens: micro-batches are sharded over [Ulysses] and over []",
            "shard all micro-batches alike",
        ],
        |device| {
            let whole = SpTensor::replicated(Tensor::<2, Int>::zeros([1, 4], device.device()), &device);
            let sharded = labels(&device, Split::Contiguous);
            valid_tokens([&sharded, &whole]);
        },
    );
    // A label that is no class: named, with what would be one.
    let report = failure(TWO, |device| {
        let weight = Tensor::ones([3, 5], device.device());
        let labels = labels(&device, Split::Contiguous).tokenwise(|labels| labels + 5);
        drop(token_loss(hidden(&device), weight, &labels, None, 4));
    });
    contains(&report, &["5"]);
}

/// Gradients of parameters that other ranks lack: every rank fails, none waits.
#[test]
fn ranks_with_gradients_of_different_parameters() {
    let report = failure(TWO, |device| {
        let mut linear = LinearConfig::new(2, 2).init(device.device());
        if device.rank() == 1 {
            linear.bias = Some(Param::initialized(
                ParamId::new(),
                Tensor::<1>::ones([2], device.device()),
            ));
        }
        let loss = linear
            .forward(Tensor::<2>::ones([1, 2], device.device()))
            .cast(DType::F32)
            .sum();
        let grads = burn::optim::GradientsParams::from_grads(loss.backward(), &linear);
        drop(burn_sp::train::sum_gradients(
            &linear,
            grads,
            &burn_sp::train::ParamLayouts::replicated(),
            device.mesh(),
        ));
    });
    contains(
        &report,
        &[
            "the ranks of a group disagree on the shape",
            "[6, f32]",
            "[4, f32]",
            "refusals.rs",
        ],
    );
}
