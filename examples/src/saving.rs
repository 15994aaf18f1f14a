//! Training state in the programs: when it is saved, and what a run must have to go on from one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn_sp::SpDevice;
use burn_sp::comm::{CommError, raise};
use burn_sp::train::{ParamLayouts, ParamShards, SavedState, StateInfo, StateStore, StatefulOptimizer, saved_states};
use serde_json::Value;

use crate::InputError;
use crate::config::{StateConfig, refuse};
use crate::trainer::Optimizer;

/// What may change from one run to the next: what no saved number depends on. Files may have moved.
const FREE: [&str; 28] = [
    "engine",
    "device",
    "ranks",
    "dp",
    "ring",
    "ulysses",
    "tp",
    "kv",
    "steps",
    "timeout",
    "lr",
    "clip",
    "recompute",
    "keep",
    "mlp_tiles",
    "shard",
    "text",
    "video",
    "vae",
    "weights",
    "sample",
    "sample_every",
    "samples",
    "sample_frames",
    "sample_steps",
    "solver",
    "guidance",
    "fps",
];

/// Of a run: where states go and come from, and what is said of it in them.
pub(crate) struct Saving<'a> {
    state: &'a StateConfig,
    steps: usize,
    /// Before the first step.
    info: StateInfo,
}

impl<'a> Saving<'a> {
    /// `config` is that of a report.
    pub fn new(state: &'a StateConfig, program: &str, steps: usize, seed: u64, config: &Value) -> Self {
        let mut config = config.clone();
        config["program"] = program.into();
        let info = StateInfo { step: 0, seed, config };
        Self { state, steps, info }
    }

    /// Looks at the states before any rank starts. What is resumed, in a line.
    ///
    /// # Errors
    /// One line: if there is nothing to go on from, or not for this run, or the new states would be mixed with others.
    pub fn check(&self) -> Result<Option<String>, InputError> {
        let wrong = |flag: &'static str| move |error| InputError(format!("{flag} {error}"));
        let from = self.state.resume.as_ref();
        let from = from.map(SavedState::open).transpose().map_err(wrong("--resume"))?;
        if let Some(from) = &from {
            self.check_resumed(from)?;
        }
        if let Some(folder) = &self.state.save
            && let Some(newest) = saved_states(folder).map_err(wrong("--save"))?.pop()
            && !from.as_ref().is_some_and(|from| same(from.folder(), &newest))
        {
            return refuse(format!(
                "--save {}: {} is there already, and this run does not go on from it; --resume it, or save in another \
                 folder",
                folder.display(),
                newest.display()
            ));
        }
        Ok(from.map(|from| format!("resumed: {}", from.folder().display())))
    }

    fn check_resumed(&self, from: &SavedState) -> Result<(), InputError> {
        let (folder, info) = (from.folder().display(), from.info());
        let [saved, this] =
            [&info.config, &self.info.config].map(|config| config["program"].as_str().unwrap_or("none"));
        if saved != this {
            return refuse(format!(
                "--resume {folder}: {saved} saved it, and this is {this}; resume it with that program"
            ));
        }
        if let Some((saved, this)) = difference(&info.config, &self.info.config) {
            return refuse(format!(
                "--resume {folder}: it was saved {saved}, and this run is {this}; give the same, or start anew without \
                 --resume"
            ));
        }
        if info.step >= self.steps as u64 {
            return refuse(format!(
                "--steps {}: {folder} has done {} already; use --steps {} or more, as they are counted from the start",
                self.steps,
                info.step,
                info.step + 1
            ));
        }
        Ok(())
    }

    /// Where the states are, as a rank sees them.
    pub fn on(&self, device: &SpDevice, layouts: &ParamLayouts, shards: &ParamShards) -> Keeper<'_> {
        let store = |folder: &PathBuf| {
            let store = StateStore::new(folder, device);
            store.with_layouts(layouts).with_shards(shards)
        };
        Keeper {
            saving: self,
            save: self.state.save.as_ref().map(store),
            resume: self.state.resume.as_ref().map(store),
        }
    }
}

/// Saves and loads for a rank. What cannot be written or read ends the run, with the same report on every rank.
pub(crate) struct Keeper<'a> {
    saving: &'a Saving<'a>,
    save: Option<StateStore>,
    resume: Option<StateStore>,
}

impl Keeper<'_> {
    /// The model and optimizer to go on with, and how many steps they have done. Collective.
    pub fn resume<M: Module>(&self, model: M, optimizer: Optimizer) -> (M, Optimizer, usize) {
        let Some(store) = &self.resume else {
            return (model, optimizer, 0);
        };
        match store.load(model, optimizer) {
            Ok((model, optimizer, info)) => (model, optimizer, info.step as usize),
            Err(error) => raise(CommError::failed(0, format!("--resume {error}"))),
        }
    }

    /// Saves after a step, if it is time. Collective.
    pub fn save<M: Module>(&self, step: usize, model: &M, optimizer: &Optimizer) {
        let Saving { state, steps, info } = self.saving;
        let due = state.save_every.is_some_and(|every| step.is_multiple_of(every)) || step == *steps;
        if let Some(store) = self.save.as_ref().filter(|_| due) {
            let step = step as u64;
            if let Err(error) = store.save(&StateInfo { step, ..info.clone() }, model, optimizer) {
                raise(CommError::failed(0, format!("--save {error}")));
            }
        }
    }
}

impl StatefulOptimizer for Optimizer {
    fn optimizer(&self) -> &ModuleOptimizer {
        match self {
            Optimizer::Whole(optimizer) => optimizer.optimizer(),
            Optimizer::Shared(optimizer) => optimizer.optimizer(),
        }
    }

    fn is_shared(&self) -> bool {
        match self {
            Optimizer::Whole(optimizer) => optimizer.is_shared(),
            Optimizer::Shared(optimizer) => optimizer.is_shared(),
        }
    }

    fn with_record(self, record: OptimizerRecord) -> Self {
        match self {
            Optimizer::Whole(optimizer) => Optimizer::Whole(optimizer.with_record(record)),
            Optimizer::Shared(optimizer) => Optimizer::Shared(optimizer.with_record(record)),
        }
    }
}

/// The first field that differs and may not, as flags: those of the one, and of the other.
fn difference(saved: &Value, this: &Value) -> Option<(String, String)> {
    // As it would come back from a file, which rounds floats.
    let this: Value = serde_json::from_str(&this.to_string()).unwrap_or_default();
    let fields = |config: &Value| config.as_object().cloned().unwrap_or_default();
    let (saved, this) = (fields(saved), fields(&this));
    let names: BTreeSet<&String> = saved.keys().chain(this.keys()).collect();
    let mut names = names.into_iter().filter(|name| !FREE.contains(&name.as_str()));
    let differing = names.find(|name| saved.get(*name) != this.get(*name))?;
    let flag = |value: Option<&Value>| {
        let flag = format!("--{}", differing.replace('_', "-"));
        match value {
            None | Some(Value::Null) => format!("without {flag}"),
            Some(Value::String(value)) => format!("with {flag} {value}"),
            Some(value) => format!("with {flag} {value}"),
        }
    };
    Some((flag(saved.get(differing)), flag(this.get(differing))))
}

/// Whether both are one folder.
fn same(one: &Path, other: &Path) -> bool {
    match (fs::canonicalize(one), fs::canonicalize(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}
