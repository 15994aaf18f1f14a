//! Whole modules, made alike on every rank, cut into this rank's parts.

use burn::module::Param;
use burn::nn::{Embedding, Linear};
use burn::tensor::Tensor;

use super::{super::RmsNorm, Features};
use crate::{
    SpDevice,
    layout::Layout,
    tensor::{Refusal, own_storage},
    train::ParamLayouts,
};

/// Keeps this rank's columns of a layer whose outputs are `features`, and their biases, and lists them.
///
/// # Shapes
/// - weight `[inputs, outputs]` -> `[inputs, outputs / tp]`, bias `[outputs]` -> `[outputs / tp]`
///
/// # Panics
/// If the layer does not have that many (it may have been sharded already).
#[track_caller]
pub fn shard_columns(layer: Linear, features: Features, device: &SpDevice, layouts: &mut ParamLayouts) -> Linear {
    Linear {
        weight: shard(layer.weight, 1, features, device, layouts),
        bias: layer.bias.map(|bias| shard(bias, 0, features, device, layouts)),
    }
}

/// Keeps this rank's rows of a layer whose inputs are `features`, and lists them. Every rank keeps the bias.
///
/// # Shapes
/// - weight `[inputs, outputs]` -> `[inputs / tp, outputs]`
///
/// # Panics
/// If the layer does not have that many (it may have been sharded already).
#[track_caller]
pub fn shard_rows(layer: Linear, features: Features, device: &SpDevice, layouts: &mut ParamLayouts) -> Linear {
    Linear {
        weight: shard(layer.weight, 0, features, device, layouts),
        ..layer
    }
}

/// Keeps this rank's entries of an embedding, and lists them.
///
/// # Shapes
/// - weight `[entries, hidden]` -> `[entries / tp, hidden]`
///
/// # Panics
/// If the layer does not have that many (it may have been sharded already).
#[track_caller]
pub fn shard_entries(
    embedding: Embedding,
    entries: Features,
    device: &SpDevice,
    layouts: &mut ParamLayouts,
) -> Embedding {
    Embedding {
        weight: shard(embedding.weight, 0, entries, device, layouts),
    }
}

/// Keeps this rank's features of a norm over all of them, and lists them.
///
/// # Shapes
/// - weight `[features]` -> `[features / tp]`
///
/// # Panics
/// If the norm does not have that many (it may have been sharded already).
#[track_caller]
pub fn shard_norm(norm: RmsNorm, features: Features, device: &SpDevice, layouts: &mut ParamLayouts) -> RmsNorm {
    RmsNorm {
        gamma: shard(norm.gamma, 0, features, device, layouts),
        ..norm
    }
}

/// Keeps this rank's part of a parameter, `dim` split as the features are. It has the whole one's id and is trained if
/// that was; nothing of the whole one stays.
#[track_caller]
fn shard<const D: usize>(
    param: Param<Tensor<D>>,
    dim: usize,
    features: Features,
    device: &SpDevice,
    layouts: &mut ParamLayouts,
) -> Param<Tensor<D>> {
    if !features.is_split(device.mesh()) {
        return param;
    }
    if param.dims()[dim] != features.count() {
        Refusal::new(
            "shard",
            format!(
                "a parameter of {:?} has no {} features along dimension {dim}",
                param.dims(),
                features.count()
            ),
            "shard the whole module, once, by the features that it has",
        )
        .refuse();
    }
    let layout = features.on(Layout::replicated(param.dims()), dim, device.mesh());
    layouts.list(param.id, layout.clone());
    param.map(|whole| {
        let tracked = whole.is_require_grad();
        own_storage(device.distribute(whole.detach(), &layout).into_local()).set_require_grad(tracked)
    })
}
