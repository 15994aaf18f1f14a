use std::cell::RefCell;
use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Gradients, Int, Tensor, TensorData};
use burn_sp::train::{LossShare, ParamLayouts};
use burn_sp::{SpDevice, SpTensor};

use crate::Values;
use crate::values::whole_parameters;

/// The tensors that a closure asks for by name.
pub(crate) type Inputs = BTreeMap<String, TensorData>;

/// What a compared closure gets beside its model: its place on the mesh, and the inputs in the dtype of this run.
pub struct Rank {
    device: SpDevice,
    dtype: DType,
    layouts: ParamLayouts,
    inputs: Inputs,
    /// Reads the gradient of an input that was handed out.
    used: RefCell<Vec<(String, ReadGradient)>>,
}

type ReadGradient = Box<dyn Fn(&Gradients) -> Option<Values>>;

impl Rank {
    pub(crate) fn new(device: SpDevice, dtype: DType, layouts: ParamLayouts, inputs: Inputs) -> Self {
        Self {
            device,
            dtype,
            layouts,
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

    /// The parameters that are sharded, as [`Comparison::shard_by`](crate::Comparison::shard_by) said.
    pub fn layouts(&self) -> &ParamLayouts {
        &self.layouts
    }

    /// A named float input, whole, in this run's dtype. Its gradient is compared too.
    ///
    /// # Shapes
    /// - returns that of the data which [`Comparison::input`](crate::Comparison::input) was given
    ///
    /// # Panics
    /// If there is no such input, or it has another number of dimensions.
    #[track_caller]
    pub fn input<const D: usize>(&self, name: &str) -> Tensor<D> {
        let data = self.data(name).convert_dtype(self.dtype);
        let tensor = Tensor::<D>::from_data(data, (self.device.device(), self.dtype)).require_grad();
        let leaf = tensor.clone();
        let read = move |grads: &Gradients| leaf.grad(grads).map(|grad| Values::of(&grad));
        self.used.borrow_mut().push((name.to_owned(), Box::new(read)));
        tensor
    }

    /// A named int input, whole: token ids, say. Take tokens from here rather than from the closure's surroundings: if something
    /// differs, the comparison changes single tokens to see which others notice, which tells most faults apart.
    ///
    /// # Shapes
    /// - as [`input`](Self::input)
    ///
    /// # Panics
    /// As [`input`](Self::input).
    #[track_caller]
    pub fn int_input<const D: usize>(&self, name: &str) -> Tensor<D, Int> {
        Tensor::from_data(self.data(name), self.device.device())
    }

    #[track_caller]
    fn data(&self, name: &str) -> TensorData {
        let data = self.inputs.get(name).cloned();
        data.unwrap_or_else(|| panic!("no input {name:?}; there are {:?}", self.inputs.keys()))
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

/// What a compared closure returns: the loss with its gradients, and any tensors to compare by name.
pub struct Outcome {
    pub(crate) step: Step,
    pub(crate) outputs: Vec<Piece>,
    pub(crate) parameters: Option<ReadParameters>,
}

/// Who differentiates.
pub(crate) enum Step {
    /// The comparison.
    Share(Box<LossShare>),
    /// The closure did.
    Own { loss: f64, gradients: GradientsParams },
}

pub(crate) type ReadParameters = Box<dyn FnOnce(&ParamLayouts, &SpDevice) -> BTreeMap<String, Values>>;

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
    /// A loss that the comparison differentiates; it sums the gradients with
    /// [`sum_gradients`](burn_sp::train::sum_gradients). No outputs yet.
    pub fn new(loss: LossShare) -> Self {
        Self::of(Step::Share(Box::new(loss)))
    }

    /// What a training step of your own ended with, checked as it is: the loss that this rank reports, and the gradients that it
    /// gives to the optimizer. Both must be of the whole batch, on every rank. No outputs yet; gradients of inputs are not
    /// compared.
    ///
    /// # Example
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::GradientsParams;
    /// # use burn::tensor::{Device, TensorData};
    /// # use burn_sp::prelude::*;
    /// # use burn_sp_tests::{Comparison, FaultKind, Outcome};
    /// # let linear = LinearConfig::new(3, 2).init(&Device::flex());
    /// # let x = TensorData::new((0..30).map(|i| (i as f32).sin()).collect::<Vec<_>>(), [2, 5, 3]);
    /// let difference = Comparison::new(linear).input("x", x).run(|rank, linear| {
    ///     let x = rank.input::<3>("x");
    ///     let layout = rank.device().sequence_layout(x.dims());
    ///     let y = rank.device().distribute(x, &layout).tokenwise(|x| linear.forward(x));
    ///     let loss = LossShare::mean(y.clone().mul(y));
    ///     // The gradients are never summed over the ranks.
    ///     let gradients = GradientsParams::from_grads(loss.backward(), linear);
    ///     Outcome::of_step(loss.value(), gradients)
    /// });
    /// let diagnosis = difference.unwrap_err().diagnosis.unwrap();
    /// assert_eq!(diagnosis.kind, FaultKind::MissingSum);
    /// ```
    pub fn of_step(loss: f64, gradients: GradientsParams) -> Self {
        Self::of(Step::Own { loss, gradients })
    }

    fn of(step: Step) -> Self {
        Self {
            step,
            outputs: Vec::new(),
            parameters: None,
        }
    }

    /// Also compares the parameters of a module: after an optimizer's step, or where a rank built a model of its own. It must
    /// have the parameters of the compared module, so that its layouts apply.
    pub fn parameters<M: Module + 'static>(mut self, module: &M) -> Self {
        let module = module.clone();
        self.parameters = Some(Box::new(move |layouts, device| {
            whole_parameters(&module, layouts, device)
        }));
        self
    }

    /// Also compares a tensor, in whatever layout it is. Record them in the order in which they are computed: what differs
    /// first is where the fault is.
    ///
    /// # Panics
    /// If the tensor is partial: its terms differ from mesh to mesh. Redistribute it first. If there is an output of that name.
    #[track_caller]
    pub fn output<const D: usize>(mut self, name: impl Into<String>, tensor: &SpTensor<D>) -> Self {
        let name = name.into();
        assert!(
            tensor.layout().partial_axes().is_empty(),
            "output {name:?} is {}: redistribute it to Replicate or Shard first",
            tensor.layout()
        );
        let taken = self.outputs.iter().any(|output| output.name == name);
        assert!(!taken, "two outputs are called {name:?}; give each a name of its own");
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
