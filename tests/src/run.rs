use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::DType;
use burn_sp::train::sum_gradients;

use crate::outcome::{Piece, Step};
use crate::values::parameter_paths;
use crate::{Outcome, Quantity, Rank, Values, gather_gradients, gradients_by_path};

/// What one rank ended with.
pub(crate) struct Run {
    pub loss: f64,
    pub outputs: Vec<Piece>,
    pub inputs: BTreeMap<String, Values>,
    pub gradients: BTreeMap<String, Values>,
    /// This rank's own gradients of replicated parameters, before they were summed; none of a step of the closure's own.
    pub terms: BTreeMap<String, Values>,
    pub parameters: BTreeMap<String, Values>,
    /// The paths of all parameters, in the module's order.
    pub paths: Vec<String>,
}

/// How much of a run is wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detail {
    /// All but the terms of the gradients.
    Compare,
    /// All.
    Terms,
    /// Outputs and loss.
    Forward,
}

impl Run {
    /// Finishes a closure's step on this rank. Collective.
    pub fn of<M: Module>(outcome: Outcome, rank: &Rank, module: &M, detail: Detail) -> Self {
        let mut run = Self {
            loss: 0.0,
            outputs: outcome.outputs,
            inputs: BTreeMap::new(),
            gradients: BTreeMap::new(),
            terms: BTreeMap::new(),
            parameters: BTreeMap::new(),
            paths: parameter_paths(module),
        };
        let (device, layouts) = (rank.device(), rank.layouts());
        let summed = match outcome.step {
            Step::Share(loss) => {
                run.loss = loss.value();
                if detail == Detail::Forward {
                    return run;
                }
                let mut grads = loss.backward();
                run.inputs = rank.input_gradients(&grads);
                let own = GradientsParams::from_module(&mut grads, module);
                if detail == Detail::Terms {
                    run.terms = gradients_by_path(module, &own);
                }
                sum_gradients(module, own, layouts, device.mesh())
            }
            Step::Own { loss, gradients } => {
                run.loss = loss;
                gradients
            }
        };
        if detail == Detail::Forward {
            return run;
        }
        let whole = gather_gradients(module, summed, layouts, device);
        run.gradients = gradients_by_path(module, &whole);
        if let Some(read) = outcome.parameters {
            run.parameters = read(layouts, device);
        }
        run
    }

    /// All that is compared; the gradients of the inputs are those given, of which a rank has a term only.
    pub fn quantities<'a>(&'a self, inputs: &'a BTreeMap<String, Values>) -> BTreeMap<Quantity, Part<'a>> {
        let loss = Part {
            shape: &[],
            dtype: None,
            elements: std::slice::from_ref(&self.loss),
            indices: None,
        };
        let outputs = self
            .outputs
            .iter()
            .map(|piece| (Quantity::Output(piece.name.clone()), Part::of(piece)));
        type Named = fn(String) -> Quantity;
        let named: [(&'a BTreeMap<String, Values>, Named); 3] = [
            (inputs, Quantity::InputGradient),
            (&self.gradients, Quantity::Gradient),
            (&self.parameters, Quantity::Parameter),
        ];
        let wholes = named.into_iter().flat_map(|(all, quantity)| {
            all.iter()
                .map(move |(name, values)| (quantity(name.clone()), Part::whole(values)))
        });
        std::iter::once((Quantity::Loss, loss))
            .chain(outputs)
            .chain(wholes)
            .collect()
    }

    /// Where a quantity stands in a training step: outputs as they were recorded, the loss, gradients from the loss backward,
    /// parameters.
    pub fn order(&self, quantity: &Quantity) -> (usize, usize) {
        let place = |path: &String| {
            self.paths
                .iter()
                .position(|other| other == path)
                .unwrap_or(usize::MAX / 2)
        };
        match quantity {
            Quantity::Output(name) => {
                let place = self.outputs.iter().position(|piece| piece.name == *name);
                (0, place.unwrap_or(usize::MAX))
            }
            Quantity::Loss => (1, 0),
            Quantity::Gradient(path) => (2, usize::MAX - place(path)),
            Quantity::InputGradient(_) => (3, 0),
            Quantity::Parameter(path) => (4, place(path)),
        }
    }

    pub fn output(&self, name: &str) -> Option<&Piece> {
        self.outputs.iter().find(|piece| piece.name == name)
    }
}

/// Some elements of a whole tensor: all of them if there are no indices.
pub(crate) struct Part<'a> {
    pub shape: &'a [usize],
    pub dtype: Option<DType>,
    pub elements: &'a [f64],
    pub indices: Option<Vec<usize>>,
}

impl<'a> Part<'a> {
    fn whole(values: &'a Values) -> Self {
        Self {
            shape: &values.shape,
            dtype: Some(values.dtype),
            elements: &values.elements,
            indices: None,
        }
    }

    fn of(piece: &'a Piece) -> Self {
        Self {
            shape: &piece.shape,
            dtype: Some(piece.local.dtype),
            elements: &piece.local.elements,
            indices: Some(piece.global_indices()),
        }
    }

    pub fn kind(&self) -> String {
        match self.dtype {
            Some(dtype) => format!("{:?} of {}", self.shape, dtype.name()),
            None => format!("{:?}", self.shape),
        }
    }

    pub fn index(&self, local: usize) -> usize {
        self.indices.as_ref().map_or(local, |indices| indices[local])
    }
}
