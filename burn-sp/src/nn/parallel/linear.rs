use std::sync::Arc;

use burn::backend::Dispatch;
use burn::nn::Linear;
use burn::tensor::{Tensor, module::linear};
use burn_sp_comm::{Site, raise};

use super::{ColumnInput, Features};
use crate::{
    SpOps, SpTensor,
    layout::{Axis, Layout, Mesh, Placement},
    tensor::{Place, Refusal, Transition},
};

/// The input of column-parallel layers: tokens that were sharded over [`Axis::Tp`], gathered once for all layers that
/// read them (tensor parallelism of Megatron-LM, arXiv 1909.08053, with its sequence parallelism, arXiv 2205.05198).
///
/// For backward each layer keeps this rank's own tokens, not the gathered ones: these are gathered again, once for all
/// layers too, and their gradients are added up before one reduce-scatter brings each token's home. Drop it when the
/// last layer has read it.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::nn::{Features, Gathered, row_linear, shard_columns, shard_rows};
/// use burn_sp::prelude::*;
///
/// let config = LaunchConfig::new(MeshShape::tp(2));
/// launch(&config, &Device::flex().autodiff(), |device: SpDevice| {
///     // An MLP of 6 hidden units: 3 a rank.
///     let hidden = Features::sharded(6, 1);
///     let (up, down) = device.seeded(1, |device| {
///         (LinearConfig::new(4, 6).init(device), LinearConfig::new(6, 4).init(device))
///     });
///     let mut layouts = ParamLayouts::replicated();
///     let up = shard_columns(up, hidden, &device, &mut layouts);
///     let down = shard_rows(down, hidden, &device, &mut layouts);
///
///     // 5 tokens: 3 on rank 0, 2 on rank 1, before and after.
///     let x = SpTensor::replicated(Tensor::<3>::ones([1, 5, 4], device.device()), &device)
///         .redistribute(Axis::Tp, Placement::Shard(1));
///     let y = Gathered::new(x).linear(&up, hidden);
///     assert_eq!(y.local().dims(), [1, 5, 3]);
///     let y = row_linear(y, &down, Placement::Shard(1));
///     assert_eq!(y.local().dims(), [1, if device.rank() == 0 { 3 } else { 2 }, 4]);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[derive(Debug)]
pub struct Gathered {
    /// Nothing but the layers below may read it: see [`gather_input_autodiff`](super::input::gather_input_autodiff).
    whole: Tensor<3>,
    kept: Tensor<3>,
    input: Option<ColumnInput>,
    layout: Layout,
    mesh: Arc<Mesh>,
}

impl Gathered {
    /// Gathers the tokens. Tokens that every rank has whole are taken as they are.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, features]`
    ///
    /// # Panics
    /// If `x` is partial, its features are sharded, or another axis shards its tokens inside [`Axis::Tp`].
    #[track_caller]
    pub fn new(x: SpTensor<3>) -> Self {
        const OP: &str = "Gathered::new";
        x.refuse_partial(OP);
        let (kept, layout, mesh) = x.into_parts();
        if !layout.without_single(&mesh).shards(2).is_empty() {
            Refusal::new(
                OP,
                format!("the features of the input {layout} are sharded"),
                "gather them first with .redistribute(axis, Placement::Replicate)",
            )
            .refuse();
        }
        let Placement::Shard(dim) = layout.placement(Axis::Tp) else {
            return Self {
                whole: kept.clone(),
                kept,
                input: None,
                layout,
                mesh,
            };
        };
        let inner = layout.shards(dim).last().map(|(axis, _)| *axis);
        if inner != Some(Axis::Tp) {
            Refusal::new(
                OP,
                format!("the input is {layout}"),
                "shard its tokens over Tp, inside the other axes that shard them",
            )
            .refuse();
        }
        let whole_layout = layout.without_inner(dim);
        if mesh.size(Axis::Tp) == 1 {
            return Self {
                whole: kept.clone(),
                kept,
                input: None,
                layout: whole_layout,
                mesh,
            };
        }
        let input = ColumnInput::new(Transition {
            from: Place::Shard {
                dim,
                parts: layout.inner_parts(dim, &mesh),
            },
            to: Place::Replicate,
            comm: mesh.group(&[Axis::Tp]).unwrap_or_else(|error| raise(error)),
            site: Site::here(),
        });
        let whole = <Dispatch as SpOps>::gather_input(kept.clone().into_dispatch(), input.clone());
        Self {
            whole: Tensor::from_dispatch(whole),
            kept,
            input: Some(input),
            layout: whole_layout,
            mesh,
        }
    }

    /// A layer of which this rank has the columns of its features, and their biases.
    ///
    /// # Shapes
    /// - returns `[batch, tokens, features]`, all tokens of the group, `features` sharded over [`Axis::Tp`] as they are
    ///
    /// # Panics
    /// If the layer's weight is not this rank's part.
    #[track_caller]
    pub fn linear(&self, layer: &Linear, features: Features) -> SpTensor<3> {
        let bias = layer.bias.as_ref().map(|bias| bias.val());
        self.linear_with(layer.weight.val(), bias, features)
    }

    /// [`linear`](Self::linear) from its parameters.
    ///
    /// # Shapes
    /// - `weight`: this rank's columns `[inputs, features / tp]`, `bias`: `[features / tp]`
    /// - returns what [`linear`](Self::linear) does
    ///
    /// # Panics
    /// As [`linear`](Self::linear).
    #[track_caller]
    pub fn linear_with(&self, weight: Tensor<2>, bias: Option<Tensor<1>>, features: Features) -> SpTensor<3> {
        const OP: &str = "Gathered::linear_with";
        let [batch, tokens, inputs] = *self.layout.shape() else {
            unreachable!("three dimensions")
        };
        let count = features.count();
        features.check_shard(OP, &weight, Layout::replicated([inputs, count]), 1, &self.mesh);
        let layout = self.layout.clone().with_shape(vec![batch, tokens, count]);
        let layout = features.on(layout, 2, &self.mesh);
        let local = if self.mesh.size(Axis::Tp) == 1 {
            linear(self.whole.clone(), weight, bias)
        } else {
            let (x, kept) = (self.whole.clone().into_dispatch(), self.kept.clone().into_dispatch());
            let y = <Dispatch as SpOps>::parallel_linear(x, kept, weight.into_dispatch(), self.input.clone());
            add_bias(Tensor::from_dispatch(y), bias)
        };
        SpTensor::checked(OP, local, layout, self.mesh.clone())
    }
}

/// A layer of which this rank has the rows of its features: each rank's product is a term of the sum, which goes to
/// `tokens`, and then the bias is added, once.
///
/// # Shapes
/// - `h`: `[batch, tokens, features]`, features sharded over [`Axis::Tp`]
/// - returns `[batch, tokens, outputs]`; with `tokens` = `Placement::Shard(1)` each rank gets its tokens of the sum, by a
///   reduce-scatter, with `Placement::Replicate` all ranks get all of it
///
/// # Panics
/// If the features of `h` are not sharded over [`Axis::Tp`], or the layer's weight is not this rank's part.
#[track_caller]
pub fn row_linear(h: SpTensor<3>, layer: &Linear, tokens: Placement) -> SpTensor<3> {
    const OP: &str = "row_linear";
    if h.mesh().size(Axis::Tp) == 1 {
        return h.tokenwise(|h| layer.forward(h)).redistribute(Axis::Tp, tokens);
    }
    let (local, layout, mesh) = h.into_parts();
    let weight = layer.weight.val();
    let ([.., held], [rows, outputs]) = (local.dims(), weight.dims());
    if !matches!(layout.shards(2), [(Axis::Tp, _)]) {
        Refusal::new(
            OP,
            format!("the features of {layout} are not sharded over tp"),
            "give it what a column-parallel layer made (Gathered::linear with Features::sharded)",
        )
        .refuse();
    }
    if rows != held {
        Refusal::new(
            OP,
            format!("the weight is {:?}", weight.dims()),
            format!(
                "rank {} has {held} features of {layout}: shard the module before it is used",
                mesh.rank()
            ),
        )
        .refuse();
    }
    let y = <Dispatch as SpOps>::parallel_linear(
        local.clone().into_dispatch(),
        local.into_dispatch(),
        weight.into_dispatch(),
        None,
    );
    let mut shape = layout.shape().to_vec();
    shape[2] = outputs;
    let layout = layout.without_inner(2).with_shape(shape).partial(Axis::Tp);
    let sum = SpTensor::checked(OP, Tensor::from_dispatch(y), layout, mesh).redistribute(Axis::Tp, tokens);
    match &layer.bias {
        Some(bias) => sum.tokenwise(|y| add_bias(y, Some(bias.val()))),
        None => sum,
    }
}

fn add_bias(y: Tensor<3>, bias: Option<Tensor<1>>) -> Tensor<3> {
    match bias {
        Some(bias) => {
            // Not unsqueeze, which fails on an empty bias.
            let [features] = bias.dims();
            y + bias.reshape([features, 1, 1]).swap_dims(0, 2)
        }
        None => y,
    }
}
