use burn::backend::{
    Backend, backend_extension,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use super::transition::Transition;
use crate::{attention::AttentionCall, nn::ColumnInput, train::TokenLossSpec};

/// The operations of this crate that run below Burn's tensor API, routed to whatever backend a tensor is on.
///
/// Users call [`SpTensor`](crate::SpTensor), [`attention`](crate::attention::attention) and the losses instead.
#[backend_extension(Flex: cfg(feature = "flex"), Cube: cfg(feature = "cube"), Autodiff)]
pub trait SpOps: Backend {
    /// A layout change of a float tensor: *the* layout node of the autodiff graph.
    ///
    /// # Shapes
    /// - `tensor`: this rank's part before the change; returns its part after it
    fn redistribute(tensor: FloatTensor<Self>, transition: Transition) -> FloatTensor<Self>;

    /// A layout change of an int tensor.
    fn redistribute_int(tensor: IntTensor<Self>, transition: Transition) -> IntTensor<Self>;

    /// A layout change of a bool tensor.
    fn redistribute_bool(tensor: BoolTensor<Self>, transition: Transition) -> BoolTensor<Self>;

    /// Attention between tokens that ranks share; see [`attention`](crate::attention::attention).
    ///
    /// # Shapes
    /// - this rank's parts, as those of [`attention`](crate::attention::attention)
    fn sharded_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: AttentionCall,
    ) -> FloatTensor<Self>;

    /// The loss of local tokens, chunk by chunk; see [`token_loss`](crate::train::token_loss).
    ///
    /// # Shapes
    /// - `hidden`: `[tokens, features]`, `weight`: `[features, classes]`, `targets`, `weights`: `[tokens]`; returns
    ///   `[1]`
    fn token_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: FloatTensor<Self>,
        spec: TokenLossSpec,
    ) -> FloatTensor<Self>;

    /// The input of column-parallel layers, gathered; see [`Gathered`](crate::nn::Gathered).
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, features]`, this rank's tokens; returns all of the group
    fn gather_input(x: FloatTensor<Self>, input: ColumnInput) -> FloatTensor<Self>;

    /// `x * weight` over the last dimension, of which backward gets `kept`; see [`Gathered`](crate::nn::Gathered) and
    /// [`row_linear`](crate::nn::row_linear).
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, inputs]`, `weight`: `[inputs, outputs]`; returns `[batch, tokens, outputs]`
    /// - `kept`: `x`, or this rank's tokens of it
    fn parallel_linear(
        x: FloatTensor<Self>,
        kept: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        input: Option<ColumnInput>,
    ) -> FloatTensor<Self>;
}

/// The operations on a backend without autodiff: the generic algorithms, run forward.
macro_rules! plain_ops {
    ($backend:ty) => {
        impl SpOps for $backend {
            fn redistribute(
                tensor: FloatTensor<Self>,
                transition: crate::tensor::transition::Transition,
            ) -> FloatTensor<Self> {
                transition.run::<Self, burn::tensor::Float>(tensor)
            }

            fn redistribute_int(
                tensor: IntTensor<Self>,
                transition: crate::tensor::transition::Transition,
            ) -> IntTensor<Self> {
                transition.run::<Self, burn::tensor::Int>(tensor)
            }

            fn redistribute_bool(
                tensor: BoolTensor<Self>,
                transition: crate::tensor::transition::Transition,
            ) -> BoolTensor<Self> {
                transition.run::<Self, burn::tensor::Bool>(tensor)
            }

            fn sharded_attention(
                q: FloatTensor<Self>,
                k: FloatTensor<Self>,
                v: FloatTensor<Self>,
                call: crate::attention::AttentionCall,
            ) -> FloatTensor<Self> {
                call.forward::<Self>(q, k, v).0
            }

            fn token_loss(
                hidden: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                targets: IntTensor<Self>,
                weights: FloatTensor<Self>,
                spec: crate::train::TokenLossSpec,
            ) -> FloatTensor<Self> {
                spec.forward::<Self>(hidden, weight, targets, weights, [false, false])
                    .sum
            }

            fn gather_input(x: FloatTensor<Self>, input: crate::nn::ColumnInput) -> FloatTensor<Self> {
                input.gather::<Self>(x)
            }

            fn parallel_linear(
                x: FloatTensor<Self>,
                _kept: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                _input: Option<crate::nn::ColumnInput>,
            ) -> FloatTensor<Self> {
                crate::nn::multiply::<Self>(x, weight)
            }
        }
    };
}
pub(crate) use plain_ops;
