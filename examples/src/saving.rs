//! Training state in the programs: when it is saved, and what a run must have to go on from one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn_sp::SpDevice;
use burn_sp::comm::{CommError, raise};
use burn_sp::train::{ParamLayouts, ParamShards, SavedState, StateInfo, StateStore, StatefulOptimizer, saved_states};
use serde_json::{Map, Value};

use crate::InputError;
use crate::config::{StateConfig, refuse};
use crate::listing::same;
use crate::trainer::Optimizer;

/// What may change from one run to the next: what no saved number depends on. Files may have moved: what is in them is
/// compared as [`DATA`].
const FREE: [&str; 29] = [
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
    "tokens",
    "export",
    "video",
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

/// Of these it matters that they are given. They may have moved.
const GIVEN: [&str; 4] = ["pretrained", "tokenizer", "held_out", "vae"];

/// What tells the data apart from others. States of versions before have none.
const DATA: &str = "data";

/// Of a run: where states go and come from, and what is said of it in them.
pub(crate) struct Saving<'a> {
    state: &'a StateConfig,
    steps: usize,
    /// Before the first step.
    info: StateInfo,
}

impl<'a> Saving<'a> {
    /// `config` is that of a report, and what else must be the same; `data` is what tells the data apart from others.
    pub fn new(state: &'a StateConfig, program: &str, steps: usize, seed: u64, mut config: Value, data: &str) -> Self {
        config["program"] = program.into();
        config[DATA] = data.into();
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
            self.check_resumed(from.folder(), from.info())?;
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

    fn check_resumed(&self, folder: &Path, info: &StateInfo) -> Result<(), InputError> {
        let folder = folder.display();
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
        if let [Some(saved), Some(this)] = [&info.config, &self.info.config].map(|config| config[DATA].as_str())
            && saved != this
        {
            let default = match self.info.config.get("text") {
                Some(Value::Null) => "; without --text they are this workspace's sources, which change",
                _ => "",
            };
            return refuse(format!(
                "--resume {folder}: the data were {saved}, and are {this}{default}; give the same, or start anew without \
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
    let free = |name: &str| FREE.contains(&name) || name == DATA;
    let mut names = names.into_iter().filter(|name| !free(name));
    let given = |config: &Map<String, Value>, name: &str| config.get(name).is_some_and(|value| !value.is_null());
    let differs = |name: &&String| match GIVEN.contains(&name.as_str()) {
        true => given(&saved, name) != given(&this, name),
        false => saved.get(*name) != this.get(*name),
    };
    let differing = names.find(differs)?;
    if let (Some(saved @ Value::Object(_)), Some(this @ Value::Object(_))) = (saved.get(differing), this.get(differing))
    {
        let (saved, this) = difference(saved, this)?;
        let model = |inner: String| format!("of another model, {}", inner.replace("--", ""));
        return Some((model(saved), model(this)));
    }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Files may have other names, but not be missing, and what is in them counts.
    #[test]
    fn data_must_be_those_of_the_run_that_is_resumed() {
        let state = StateConfig::default();
        let saving = |config: &Value, data| Saving::new(&state, "trainer", 9, 7, config.clone(), data);
        let info = |config: &Value, data| StateInfo {
            step: 2,
            ..saving(config, data).info
        };
        let said = |this: Saving, saved: &StateInfo| {
            let outcome = this.check_resumed(Path::new("STATE"), saved);
            outcome.map_err(|InputError(line)| line)
        };
        let given = json!({"text": ["a"], "tokenizer": "b", "held_out": null, "batch": 3});
        let saved = info(&given, "10 bytes");
        assert_eq!(saved.config["data"], "10 bytes");
        let moved = json!({"text": ["c"], "tokenizer": "d", "tokens": "e", "batch": 3});
        assert_eq!(said(saving(&moved, "10 bytes"), &saved), Ok(()));
        let rest = "; give the same, or start anew without --resume";
        let differs = |line: &str| Err(format!("--resume STATE: {line}{rest}"));
        assert_eq!(
            said(saving(&moved, "11 bytes"), &saved),
            differs("the data were 10 bytes, and are 11 bytes")
        );
        let default = json!({"text": null, "tokenizer": "b", "batch": 3});
        assert_eq!(
            said(saving(&default, "11 bytes"), &saved),
            differs(
                "the data were 10 bytes, and are 11 bytes; without --text they are this workspace's sources, which change"
            )
        );
        let bytes = json!({"text": ["a"], "batch": 3});
        assert_eq!(
            said(saving(&bytes, "10 bytes"), &saved),
            differs("it was saved with --tokenizer b, and this run is without --tokenizer")
        );
        let apart = json!({"text": ["a"], "tokenizer": "b", "held_out": "f", "batch": 3});
        assert_eq!(
            said(saving(&apart, "10 bytes"), &saved),
            differs("it was saved without --held-out, and this run is with --held-out f")
        );
        // A version before did not say.
        let mut before = saved.clone();
        before.config.as_object_mut().unwrap().remove("data");
        assert_eq!(said(saving(&given, "11 bytes"), &before), Ok(()));
    }
}
