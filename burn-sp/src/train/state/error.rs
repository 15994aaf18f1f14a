use std::path::Path;

use serde::{Deserialize, Serialize};

/// Why a training state cannot be saved or continued; the same on every rank. Each is one line: what, where, and what would
/// work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum StateError {
    /// There is no such folder.
    #[error("{path} does not exist; name a folder that states were saved in, or one of its step-... folders")]
    Missing {
        /// What was named.
        path: String,
    },
    /// The folder has no state.
    #[error("{path} holds no training state; name a folder that states were saved in, or one of its step-... folders")]
    Empty {
        /// What was named.
        path: String,
    },
    /// A state is not what was saved.
    #[error("{state} is damaged: {what}; {}", go_on(.older))]
    Damaged {
        /// The state's folder.
        state: String,
        /// Which file, and what is wrong with it.
        what: String,
        /// The newest whole state before it.
        older: Option<String>,
    },
    /// A state is of another format.
    #[error("{state} is of format version {found}, this program reads version {reads}; use the version that saved it")]
    Version {
        /// The state's folder.
        state: String,
        /// Its version.
        found: u64,
        /// The version that can be read.
        reads: u64,
    },
    /// A state of this step or a later one is there already, so the new one would not be the newest.
    #[error("{state} is there already, so step {step} would not be the newest; remove it, or save in another folder")]
    NotNewest {
        /// The folder of the state that is there.
        state: String,
        /// The step to be saved.
        step: u64,
    },
    /// A file could not be read.
    #[error("{path} could not be read: {why}")]
    Read {
        /// The file or folder.
        path: String,
        /// The system's reason.
        why: String,
    },
    /// A file could not be written.
    #[error("{path} could not be written: {why}; states saved before are whole")]
    Write {
        /// The file or folder.
        path: String,
        /// The system's reason.
        why: String,
    },
    /// A parameter has another shape than in the model.
    #[error("{state}: {name} is {saved:?} there and {model:?} in this model; make the model as it was saved")]
    Shape {
        /// The state's folder.
        state: String,
        /// The parameter.
        name: String,
        /// Its shape in the state, whole.
        saved: Vec<usize>,
        /// Its shape in the model, whole.
        model: Vec<usize>,
    },
    /// The model has a parameter that the state lacks.
    #[error("{state} has no {name}, which is {model:?} in this model; make the model as it was saved")]
    Lacking {
        /// The state's folder.
        state: String,
        /// The parameter.
        name: String,
        /// Its shape in the model, whole.
        model: Vec<usize>,
    },
    /// The state has a tensor that the model lacks.
    #[error("{state} has {name} {saved:?}, which this model has not; make the model as it was saved")]
    Unknown {
        /// The state's folder.
        state: String,
        /// The tensor.
        name: String,
        /// Its shape in the state.
        saved: Vec<usize>,
    },
    /// Two parameters of the model have one name.
    #[error("two parameters of the model are called {name}; a state needs a name for each")]
    Twice {
        /// The name.
        name: String,
    },
    /// A tensor is of a dtype that cannot be saved.
    #[error("{name} is of {dtype}, which a state cannot hold; cast it to a plain float, int or bool first")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its dtype.
        dtype: String,
    },
    /// The optimizer's state of a parameter cannot be put together from those of the ranks.
    #[error(
        "{name} is {shape:?}, unlike its parameter, whose parts ranks hold; share out the state of an element-wise \
         optimizer only, such as AdamW"
    )]
    Elementwise {
        /// The tensor.
        name: String,
        /// Its shape on rank 0.
        shape: Vec<usize>,
    },
    /// The optimizer is of another kind than the one that was saved.
    #[error(
        "{state} has {saved} tensors of an optimizer's state, this one takes {taken}; use the optimizer that was saved"
    )]
    Optimizer {
        /// The state's folder.
        state: String,
        /// How many tensors were given to rank 0's optimizer.
        saved: usize,
        /// How many it took.
        taken: usize,
    },
    /// Burn could not take an optimizer's state apart, or put it together.
    #[error("the optimizer's state of {name}: {why}")]
    Record {
        /// The parameter.
        name: String,
        /// Burn's reason.
        why: String,
    },
}

fn go_on(older: &Option<String>) -> String {
    match older {
        Some(older) => format!("{older} is whole: name it to go on from there"),
        None => "no older state beside it is whole".into(),
    }
}

impl StateError {
    pub(super) fn read(path: &Path) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.display().to_string();
        move |error| StateError::Read {
            path: path.clone(),
            why: error.to_string(),
        }
    }

    pub(super) fn write(path: &Path) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.display().to_string();
        move |error| StateError::Write {
            path: path.clone(),
            why: error.to_string(),
        }
    }
}
