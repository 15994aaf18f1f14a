use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::tensor::{Int, Tensor};
use burn_sp::layout::{Axis, Layout, MeshShape, Placement, Split};
use burn_sp::nn::{Features, Gathered, parallel_embedding, row_linear, shard_entries};
use burn_sp::train::{ParamLayouts, class_parallel_loss};
use burn_sp::{SpDevice, SpTensor};

use crate::common::{contains, failure};

fn refused(words: &[&str], body: impl Fn(SpDevice) + Send + Sync) {
    contains(&failure(MeshShape::tp(2), body), words);
}

fn ones(device: &SpDevice, shape: [usize; 3]) -> SpTensor<3> {
    SpTensor::replicated(Tensor::ones(shape, device.device()), device)
}

#[test]
fn a_module_that_was_not_sharded() {
    refused(
        &[
            "Gathered::linear_with: the weight is [4, 6]",
            "of [4, 6 / tp] holds [4, 3]: shard the module before it is used",
        ],
        |device| {
            let x = Gathered::new(ones(&device, [1, 5, 4]));
            drop(x.linear(&LinearConfig::new(4, 6).init(device.device()), Features::sharded(6, 1)));
        },
    );
    refused(
        &[
            "row_linear: the weight is [6, 4]",
            "has 3 features of [1, 5, 6 / tp]: shard the module before it is used",
        ],
        |device| {
            let h = ones(&device, [1, 5, 6]).redistribute(Axis::Tp, Placement::Shard(2));
            drop(row_linear(
                h,
                &LinearConfig::new(6, 4).init(device.device()),
                Placement::Shard(1),
            ));
        },
    );
    refused(
        &["token_loss: the weight is [4, 7]", "of [4, 7 / tp] holds [4, "],
        |device| {
            let hidden = ones(&device, [1, 5, 4]).redistribute(Axis::Tp, Placement::Shard(1));
            let labels = SpTensor::replicated(Tensor::<2, Int>::zeros([1, 5], device.device()), &device);
            let labels = labels.redistribute(Axis::Tp, Placement::Shard(1));
            let weight = Tensor::ones([4, 7], device.device());
            drop(class_parallel_loss(
                hidden,
                weight,
                Features::sharded(7, 1),
                &labels,
                None,
                5,
            ));
        },
    );
}

#[test]
fn layouts_that_do_not_fit() {
    refused(
        &[
            "row_linear: the features of [1, 5, 6] are not sharded over tp",
            "give it what a column-parallel layer made",
        ],
        |device| {
            let layer = LinearConfig::new(6, 4).init(device.device());
            drop(row_linear(ones(&device, [1, 5, 6]), &layer, Placement::Shard(1)));
        },
    );
    refused(
        &[
            "Gathered::new: the features of the input [1, 5, 4 / tp] are sharded",
            "gather them first",
        ],
        |device| {
            drop(Gathered::new(
                ones(&device, [1, 5, 4]).redistribute(Axis::Tp, Placement::Shard(2)),
            ));
        },
    );
    refused(
        &["Gathered::new: the value [1, 5, 4] partial over tp is a sum of terms"],
        |device| {
            drop(Gathered::new(
                ones(&device, [1, 5, 4]).redistribute(Axis::Tp, Placement::Partial),
            ));
        },
    );
    refused(
        &[
            "Features::split_units: the tensor is [1, 5, 6]",
            "it should be [1, 5, 6 / tp explicit]",
        ],
        |device| drop(Features::sharded(3, 2).split_units(ones(&device, [1, 5, 6]))),
    );
    refused(
        &[
            "token_loss: the classes are sharded over tp, and the tokens of hidden [1, 5, 4] are not",
            ".shard(Axis::Tp, 1, Split::Contiguous)",
        ],
        |device| {
            let labels = SpTensor::replicated(Tensor::<2, Int>::zeros([1, 5], device.device()), &device);
            let weight = Tensor::ones([4, 3], device.device());
            drop(class_parallel_loss(
                ones(&device, [1, 5, 4]),
                weight,
                Features::sharded(6, 1),
                &labels,
                None,
                5,
            ));
        },
    );
}

#[test]
fn ids_and_labels_that_are_none() {
    let embedding = |device: &SpDevice, entries: usize, ids: SpTensor<2, Int>| {
        let split = Features::sharded(entries, 1);
        let embedding = EmbeddingConfig::new(entries, 4).init(device.device());
        let embedding = shard_entries(embedding, split, device, &mut ParamLayouts::replicated());
        drop(parallel_embedding(&embedding, ids, split, Placement::Shard(1)));
    };
    let ids =
        |device: &SpDevice, id: i64| SpTensor::replicated(Tensor::<2, Int>::full([1, 5], id, device.device()), device);
    refused(
        &["parallel_embedding: token id 7 has no entry; there are 7, from 0"],
        |device| {
            embedding(&device, 7, ids(&device, 7));
        },
    );
    refused(
        &[
            "parallel_embedding: the ids are [1, 5 / tp]",
            "give every tp rank all ids of the group",
        ],
        |device| {
            embedding(&device, 7, ids(&device, 0).shard(Axis::Tp, 1, Split::Contiguous));
        },
    );
    refused(
        &["parallel_embedding: 1 entries on 2 ranks: one would have none"],
        |device| {
            embedding(&device, 1, ids(&device, 0));
        },
    );
    refused(&["target 7 of row", "is not among the 7 classes"], |device| {
        let split = Features::sharded(7, 1);
        let hidden = ones(&device, [1, 5, 4]).redistribute(Axis::Tp, Placement::Shard(1));
        let weight = split.on(Layout::replicated([4, 7]), 1, device.mesh());
        let weight = device
            .distribute(Tensor::ones([4, 7], device.device()), &weight)
            .into_local();
        let labels = ids(&device, 7).redistribute(Axis::Tp, Placement::Shard(1));
        drop(class_parallel_loss(hidden, weight, split, &labels, None, 5));
    });
}
