use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use crate::{
    SpTensor,
    layout::{Layout, Mesh},
};

/// What goes into a checkpointed part of a model, and what comes out of it: float tensors, with or without a layout, and
/// tuples of them.
pub trait Carried: Sized + 'static {
    /// All but the elements.
    #[doc(hidden)]
    type Frame: Clone + Send + 'static;

    #[doc(hidden)]
    fn apart(self) -> (Self::Frame, Vec<DispatchTensor>);

    /// The inverse of `apart`, of as many tensors as it gave.
    #[doc(hidden)]
    fn together(frame: Self::Frame, tensors: &mut dyn Iterator<Item = DispatchTensor>) -> Self;
}

fn next(tensors: &mut dyn Iterator<Item = DispatchTensor>) -> DispatchTensor {
    tensors.next().expect("as many tensors as were taken apart")
}

impl<const D: usize> Carried for Tensor<D> {
    type Frame = ();

    fn apart(self) -> ((), Vec<DispatchTensor>) {
        ((), vec![self.into_dispatch()])
    }

    fn together((): (), tensors: &mut dyn Iterator<Item = DispatchTensor>) -> Self {
        Tensor::from_dispatch(next(tensors))
    }
}

impl<const D: usize> Carried for SpTensor<D> {
    type Frame = (Layout, Arc<Mesh>);

    fn apart(self) -> (Self::Frame, Vec<DispatchTensor>) {
        let frame = (self.layout().clone(), self.mesh().clone());
        (frame, vec![self.local().clone().into_dispatch()])
    }

    fn together((layout, mesh): Self::Frame, tensors: &mut dyn Iterator<Item = DispatchTensor>) -> Self {
        SpTensor::checked("checkpoint", Tensor::from_dispatch(next(tensors)), layout, mesh)
    }
}

macro_rules! tuple {
    ($($name:ident),*) => {
        impl<$($name: Carried),*> Carried for ($($name,)*) {
            type Frame = ($($name::Frame,)*);

            #[allow(non_snake_case)]
            fn apart(self) -> (Self::Frame, Vec<DispatchTensor>) {
                let ($($name,)*) = self;
                let mut tensors = Vec::new();
                $(let $name = {
                    let (frame, own) = $name.apart();
                    tensors.extend(own);
                    frame
                };)*
                (($($name,)*), tensors)
            }

            #[allow(non_snake_case)]
            fn together(frame: Self::Frame, tensors: &mut dyn Iterator<Item = DispatchTensor>) -> Self {
                let ($($name,)*) = frame;
                ($($name::together($name, tensors),)*)
            }
        }
    };
}

tuple!(A, B);
tuple!(A, B, C);
tuple!(A, B, C, D);
