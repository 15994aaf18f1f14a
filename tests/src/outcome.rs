use std::cell::RefCell;
use std::collections::BTreeMap;

use burn::tensor::{DType, Gradients, Tensor, TensorData};
use burn_sp::train::LossShare;
use burn_sp::{SpDevice, SpTensor};

use crate::Values;

/// What a compared closure gets beside its model: its place on the mesh, and the inputs in the dtype of this run.
pub struct Rank {
    device: SpDevice,
    dtype: DType,
    inputs: BTreeMap<String, TensorData>,
    /// Reads the gradient of an input that was handed out.
    used: RefCell<Vec<(String, ReadGradient)>>,
}

type ReadGradient = Box<dyn Fn(&Gradients) -> Option<Values>>;

impl Rank {
    pub(crate) fn new(device: SpDevice, dtype: DType, inputs: BTreeMap<String, TensorData>) -> Self {
        Self {
            device,
            dtype,
            inputs,
            used: RefCell::default(),
        }
    }

    /// The rank's device.
    pub fn device(&self) -> &SpDevice {
        &self.device
    }

    /// The float dtype of this run: the model's, or f64 in the run that the others are measured by.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A named input, whole, in this run's dtype. Its gradient is compared too.
    ///
    /// # Panics
    /// If there is no such input, or it has another number of dimensions.
    #[track_caller]
    pub fn input<const D: usize>(&self, name: &str) -> Tensor<D> {
        let data = self.inputs.get(name).cloned();
        let data = data.unwrap_or_else(|| panic!("no input {name:?}; there are {:?}", self.inputs.keys()));
        let data = data.convert_dtype(self.dtype);
        let tensor = Tensor::<D>::from_data(data, (self.device.device(), self.dtype)).require_grad();
        let leaf = tensor.clone();
        let read = move |grads: &Gradients| leaf.grad(grads).map(|grad| Values::of(&grad));
        self.used.borrow_mut().push((name.to_owned(), Box::new(read)));
        tensor
    }

    /// This rank's terms of the inputs' gradients, added up where an input was asked for several times.
    pub(crate) fn input_gradients(&self, grads: &Gradients) -> BTreeMap<String, Values> {
        let mut terms: BTreeMap<String, Values> = BTreeMap::new();
        for (name, read) in self.used.borrow().iter() {
            match (read(grads), terms.get_mut(name)) {
                (Some(term), Some(sum)) => add(sum, &term),
                (Some(term), None) => drop(terms.insert(name.clone(), term)),
                (None, _) => {}
            }
        }
        terms
    }
}

/// Adds the elements of another tensor of the same shape.
pub(crate) fn add(sum: &mut Values, term: &Values) {
    for (sum, term) in sum.elements.iter_mut().zip(&term.elements) {
        *sum += term;
    }
}

/// What a compared closure returns: the loss, and any tensors to compare by name.
pub struct Outcome {
    pub(crate) loss: LossShare,
    pub(crate) outputs: Vec<Piece>,
}

/// A rank's part of a named tensor.
#[derive(Clone)]
pub(crate) struct Piece {
    pub name: String,
    pub shape: Vec<usize>,
    /// Of each dimension, the global positions that the rank holds.
    pub positions: Vec<Vec<usize>>,
    pub local: Values,
}

impl Outcome {
    /// An outcome without outputs.
    pub fn new(loss: LossShare) -> Self {
        Self {
            loss,
            outputs: Vec::new(),
        }
    }

    /// Also compares a tensor, in whatever layout it is.
    ///
    /// # Panics
    /// If the tensor is partial: its terms differ from mesh to mesh. Redistribute it first.
    #[track_caller]
    pub fn output<const D: usize>(mut self, name: impl Into<String>, tensor: &SpTensor<D>) -> Self {
        let name = name.into();
        assert!(
            tensor.layout().partial_axes().is_empty(),
            "output {name:?} is {}: redistribute it to Replicate or Shard first",
            tensor.layout()
        );
        self.outputs.push(Piece {
            name,
            shape: tensor.global_shape().to_vec(),
            positions: (0..D).map(|dim| tensor.positions(dim).iter().collect()).collect(),
            local: Values::of(tensor.local()),
        });
        self
    }
}

impl Piece {
    /// For each local element, the row-major index in the whole tensor.
    pub fn global_indices(&self) -> Vec<usize> {
        self.positions
            .iter()
            .zip(&self.shape)
            .fold(vec![0], |indices, (positions, len)| {
                let row = |index: usize| positions.iter().map(move |position| index * len + position);
                indices.into_iter().flat_map(row).collect()
            })
    }
}
