//! Output layer and cross entropy in one node, chunk by chunk over the tokens: the logits of a long sequence are never
//! held at once, nor computed twice, because each chunk's gradients are made while its logits are there (as in Liger
//! Kernel, arXiv 2410.10989). Where ranks hold other classes, each chunk of tokens goes to all of them.

mod classes;
mod compute;
mod node;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};
use burn_sp_comm::{Site, raise};

use super::{LossShare, valid_tokens};
use crate::{
    SpOps, SpTensor,
    layout::{Axis, Layout},
    nn::Features,
    tensor::Refusal,
};
use classes::ClassGroup;
pub use compute::TokenLossSpec;
pub(crate) use node::token_loss_autodiff;

const OP: &str = "token_loss";

/// About how many logits a rank holds at once...
const CHUNK_ELEMENTS: usize = 1 << 20;
/// ...in chunks of a size that keeps the products efficient and, with a small vocabulary, the memory small.
const CHUNK_TOKENS: std::ops::RangeInclusive<usize> = 256..=1024;

/// Cross entropy of `hidden * weight` against next-token labels, as this rank's [`LossShare`]: the sum of
/// `token_weights * -log p(label)` over the tokens that are not ignored, in nats, divided by `count`. The logits of a
/// long sequence are never held at once (as in Liger Kernel, arXiv 2410.10989).
///
/// # Shapes
/// - `hidden`: `[batch, tokens, features]`, `weight`: `[features, classes]`, replicated
/// - `labels`: `[batch, tokens]` in the layout of `hidden`; a negative label is ignored
/// - `token_weights`: the same, 1 if none are given
/// - `count`: tokens of the whole (accumulated) batch, usually [`valid_tokens`](super::valid_tokens)
///
/// # Panics
/// If the layouts differ, `hidden` is partial or its features are sharded, or a label is not below the number of
/// classes.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_sp::prelude::*;
///
/// let losses = launch(&LaunchConfig::new(MeshShape::ulysses(2)), &Device::flex(), |device: SpDevice| {
///     let labels = Tensor::<2, Int>::from_ints([[1, 5, 0, 7, -100]], device.device());
///     let labels = device.distribute_tokens(labels);
///     let count = valid_tokens([&labels]);
///     assert_eq!(count, 4);
///     // All 8 logits are 0, so every class has probability 1/8.
///     let hidden = Tensor::<3>::ones([1, 5, 3], device.device());
///     let hidden = device.distribute(hidden, &device.sequence_layout([1, 5, 3]));
///     let weight = Tensor::<2>::zeros([3, 8], device.device());
///     token_loss(hidden, weight, &labels, None, count).value()
/// })?;
/// assert!(losses.iter().all(|loss| (loss - 8f64.ln()).abs() < 1e-6));
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[track_caller]
pub fn token_loss(
    hidden: SpTensor<3>,
    weight: Tensor<2>,
    labels: &SpTensor<2, Int>,
    token_weights: Option<&SpTensor<2>>,
    count: u64,
) -> LossShare {
    let classes = Features::whole(weight.dims()[1], 1);
    class_parallel_loss(hidden, weight, classes, labels, token_weights, count)
}

/// The mean cross entropy over the labels of one batch, of all ranks, that are not ignored: [`token_loss`] of a batch that
/// is not accumulated with others. Collective, as labels are counted. The output layer is a weight without a bias: make
/// Burn's `Linear` `with_bias(false)`, as language models have it, or its bias is neither used nor trained.
///
/// # Shapes
/// - as [`token_loss`]
///
/// # Panics
/// As [`token_loss`].
#[track_caller]
pub fn cross_entropy(hidden: SpTensor<3>, weight: Tensor<2>, labels: &SpTensor<2, Int>) -> LossShare {
    token_loss(hidden, weight, labels, None, valid_tokens([labels]))
}

/// [`token_loss`] with an output layer of which each rank of [`Axis::Tp`] holds some classes (Megatron-LM, arXiv
/// 1909.08053); so `hidden`, `labels` and `token_weights` must be sharded over it too.
///
/// # Shapes
/// - as [`token_loss`]; `weight`: this rank's `[features, classes / tp]`
///
/// # Panics
/// As [`token_loss`], or if the weight is not this rank's part.
#[track_caller]
pub fn class_parallel_loss(
    hidden: SpTensor<3>,
    weight: Tensor<2>,
    classes: Features,
    labels: &SpTensor<2, Int>,
    token_weights: Option<&SpTensor<2>>,
    count: u64,
) -> LossShare {
    hidden.refuse_partial(OP);
    let mesh = hidden.mesh().clone();
    // Axes of one rank shard nothing.
    let token_layout = |layout: &Layout| {
        let layout = layout.without_single(&mesh);
        layout.clone().with_shape(layout.shape()[..2].to_vec())
    };
    let tokens = token_layout(hidden.layout());
    for other in [Some(labels.layout()), token_weights.map(SpTensor::layout)]
        .into_iter()
        .flatten()
    {
        if token_layout(other) != tokens {
            Refusal::new(
                OP,
                format!("hidden is {} and the labels or weights {other}", hidden.layout()),
                "shard batch and tokens of all alike",
            )
            .refuse();
        }
    }
    if !hidden.layout().without_single(&mesh).shards(2).is_empty() {
        Refusal::new(
            OP,
            format!("the features of hidden {} are sharded", hidden.layout()),
            "gather them first with .redistribute(axis, Placement::Replicate)",
        )
        .refuse();
    }
    let whole = Layout::replicated([hidden.global_shape()[2], classes.count()]);
    classes.check_shard(OP, &weight, whole, 1, &mesh);
    let group = classes.is_split(&mesh).then(|| {
        let by_tp = |dim: &usize| matches!(tokens.shards(*dim).last(), Some((Axis::Tp, _)));
        let Some(dim) = (0..2).find(by_tp) else {
            Refusal::new(
                OP,
                format!(
                    "the classes are sharded over tp, and the tokens of hidden {} are not",
                    hidden.layout()
                ),
                "shard hidden, labels and weights with .shard(Axis::Tp, 1, Split::Contiguous)",
            )
            .refuse()
        };
        let comm = mesh.group(&[Axis::Tp]).unwrap_or_else(|error| raise(error));
        let parts = tokens.inner_parts(dim, &mesh);
        let each = tokens.local_len(1 - dim, &mesh);
        let rows = (0..comm.size()).map(|rank| parts.len_of(rank) * each).collect();
        ClassGroup::new(comm, rows, Site::here())
    });

    let (hidden, layout, mesh) = hidden.into_parts();
    // Not reshape: there a length of 0 means that of the source, and a rank may own no token.
    let targets = labels.local().clone().flatten::<1>(0, 1);
    let dtype = kernels_cubecl::accumulation(hidden.dtype());
    let valid = targets
        .clone()
        .greater_equal_elem(0)
        .float()
        .cast(dtype)
        .div_scalar(count.max(1) as f64);
    let weights = match token_weights {
        Some(weights) => valid * weights.local().clone().cast(dtype).flatten::<1>(0, 1),
        None => valid,
    };
    // The same on every rank of the group: the number of chunks is that of the collectives.
    let ranks = group.as_ref().map_or(1, ClassGroup::size);
    let logits = classes.count().div_ceil(ranks).max(1);
    let chunk = (CHUNK_ELEMENTS / logits).clamp(*CHUNK_TOKENS.start(), *CHUNK_TOKENS.end());
    let spec = TokenLossSpec {
        chunk: chunk.div_ceil(ranks),
        first: classes.range(&mesh).start,
        classes: classes.count(),
        group,
    };
    let sum = <Dispatch as SpOps>::token_loss(
        hidden.flatten::<2>(0, 1).into_dispatch(),
        weight.into_dispatch(),
        targets.into_dispatch(),
        weights.into_dispatch(),
        spec,
    );
    LossShare::from_local_sum(Tensor::from_dispatch(sum), &layout, mesh)
}
