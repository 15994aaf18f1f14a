//! Every message whole, and the same on every rank.

use std::fs;
use std::path::{Path, PathBuf};

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdafactorConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use burn_sp::SpDevice;
use burn_sp::layout::MeshShape;
use burn_sp::nn::{Features, shard_columns};
use burn_sp::train::{ParamLayouts, SavedState, ShardedOptimizer, StateInfo, StateStore};
use burn_sp_tests::parameters_by_path;

use super::model::adamw;
use crate::common::{mesh, ranks};
use crate::folder;

fn linear(inputs: usize, outputs: usize, device: &SpDevice) -> Linear {
    device.seeded(1, |device| LinearConfig::new(inputs, outputs).init(device))
}

fn updated(linear: Linear, optimizer: &mut ModuleOptimizer, device: &SpDevice) -> Linear {
    let inputs = linear.weight.dims()[0];
    let y = linear.forward(Tensor::<2>::ones([2, inputs], device.device()));
    let gradients = GradientsParams::from_grads(y.sum().backward(), &linear);
    optimizer.step(0.1, linear, gradients)
}

fn info(step: u64) -> StateInfo {
    let config = serde_json::json!({ "lr": 0.1 });
    StateInfo { step, seed: 1, config }
}

/// A folder with states after these steps.
fn saved(name: &str, steps: &[u64]) -> PathBuf {
    let folder = folder(name);
    ranks(mesh(2, 1, 1), |device| {
        let mut adamw = adamw();
        let linear = updated(linear(3, 4, &device), &mut adamw, &device);
        for step in steps {
            let store = StateStore::new(&folder, &device);
            store.save(&info(*step), &linear, &adamw).unwrap();
        }
    });
    folder
}

/// What every rank says instead of loading; `FOLDER` stands for the folder.
fn refusal(
    folder: &Path,
    model: impl Fn(&SpDevice) -> Linear + Sync,
    optimizer: &(impl Fn() -> ModuleOptimizer + Sync),
) -> String {
    let said = ranks(mesh(2, 1, 1), |device| {
        let store = StateStore::new(folder, &device);
        store
            .load(model(&device), optimizer())
            .err()
            .expect("it is refused")
            .to_string()
    });
    assert_eq!(said[0], said[1]);
    assert!(!said[0].contains('\n'), "{}", said[0]);
    said[0].replace(&folder.display().to_string(), "FOLDER")
}

fn refusal_of(folder: &Path) -> String {
    let said = refusal(folder, |device| linear(3, 4, device), &adamw);
    let alone = SavedState::open(folder).unwrap_err().to_string();
    assert_eq!(said, alone.replace(&folder.display().to_string(), "FOLDER"));
    said
}

#[test]
fn nothing_to_load() {
    let folder = folder("nothing");
    let works = "name a folder that states were saved in, or one of its step-... folders";
    assert_eq!(refusal_of(&folder), format!("FOLDER holds no training state; {works}"));
    // Not called as a state is.
    fs::create_dir(folder.join("step-5")).unwrap();
    fs::create_dir(folder.join(".step-000005.tmp")).unwrap();
    assert_eq!(refusal_of(&folder), format!("FOLDER holds no training state; {works}"));
    assert_eq!(
        refusal_of(&folder.join("none")),
        format!("FOLDER does not exist; {works}")
    );
    assert_eq!(
        refusal_of(&folder.join("step-000005")),
        format!("FOLDER does not exist; {works}")
    );
}

/// Changes a file of the newest of three states and says what is said then.
fn damage(name: &str, file: &str, change: impl Fn(Vec<u8>) -> Option<Vec<u8>>) -> String {
    let folder = saved(name, &[1, 5, 10]);
    let file = folder.join("step-000010").join(file);
    match change(fs::read(&file).unwrap()) {
        Some(bytes) => fs::write(&file, bytes).unwrap(),
        None => fs::remove_file(&file).unwrap(),
    }
    refusal_of(&folder)
}

#[test]
fn damaged_states() {
    let damaged = |what: &str| {
        format!("FOLDER/step-000010 is damaged: {what}; FOLDER/step-000005 is whole: name it to go on from there")
    };
    let tensors = "state.safetensors";
    let bytes = fs::metadata(saved("bytes", &[1]).join("step-000001").join(tensors))
        .unwrap()
        .len();
    let cut = damage("truncated", tensors, |bytes| Some(bytes[..bytes.len() - 1].into()));
    assert_eq!(
        cut,
        damaged(&format!("state.safetensors has {} bytes, not {bytes}", bytes - 1))
    );
    assert_eq!(
        damage("no-tensors", tensors, |_| None),
        damaged("it has no state.safetensors")
    );
    assert_eq!(
        damage("no-json", "state.json", |_| None),
        damaged("it has no state.json")
    );
    assert_eq!(
        damage("broken-json", "state.json", |_| Some(b"{".into())),
        damaged("state.json cannot be read: EOF while parsing an object at line 1 column 1")
    );
    assert_eq!(
        damage("foreign-json", "state.json", |_| Some(b"{\"step\": 10}".into())),
        damaged("state.json does not begin as that of a burn-sp training state")
    );
    let replaced = |from: &'static str, to: &'static str| {
        move |bytes: Vec<u8>| {
            let text = String::from_utf8(bytes).unwrap();
            assert_eq!(text.matches(from).count(), 1);
            Some(text.replace(from, to).into())
        }
    };
    let differ = damaged("state.json, state.safetensors and the folder's name do not say the same of the run");
    for (from, to) in [
        ("\"seed\": 1", "\"seed\": 3"),
        ("\"step\": 10", "\"step\": 11"),
        ("0.1", "0.3"),
    ] {
        assert_eq!(damage("changed-json", "state.json", replaced(from, to)), differ);
    }
    assert_eq!(
        damage("version", "state.json", replaced("\"version\": 1", "\"version\": 2")),
        "FOLDER/step-000010 is of format version 2, this program reads version 1; use the version that saved it"
    );
    // A byte of the header's length, of the header, and of tensors.
    for at in [0, 100, bytes as usize / 2, bytes as usize - 1] {
        let said = damage("flipped", tensors, |mut bytes| {
            bytes[at] ^= 1;
            Some(bytes)
        });
        assert!(
            said.starts_with("FOLDER/step-000010 is damaged: the checksum of state.safetensors is "),
            "{said}"
        );
        assert!(
            said.ends_with("; FOLDER/step-000005 is whole: name it to go on from there"),
            "{said}"
        );
    }
}

#[test]
fn an_older_state_is_named_if_it_is_whole() {
    let folder = saved("older", &[5, 10]);
    for step in ["step-000005", "step-000010"] {
        fs::remove_file(folder.join(step).join("state.json")).unwrap();
    }
    let said = "FOLDER/step-000010 is damaged: it has no state.json; no older state beside it is whole";
    assert_eq!(refusal_of(&folder), said);
    assert_eq!(
        refusal_of(&folder.join("step-000005")),
        "FOLDER is damaged: it has no state.json; no older state beside it is whole"
    );
}

#[test]
fn states_of_others() {
    let folder = saved("others", &[3]);
    let of = |inputs, outputs| refusal(&folder, move |device| linear(inputs, outputs, device), &adamw);
    assert_eq!(
        of(3, 5),
        "FOLDER/step-000003: weight is [3, 4] there and [3, 5] in this model; make the model as it was saved"
    );
    let without_bias = |device: &SpDevice| Linear {
        bias: None,
        ..linear(3, 4, device)
    };
    assert_eq!(
        refusal(&folder, without_bias, &adamw),
        "FOLDER/step-000003 has bias [4], which this model has not; make the model as it was saved"
    );
    assert_eq!(
        refusal(&folder, |device| linear(3, 4, device), &|| SgdConfig::new().init()),
        "FOLDER/step-000003 has 4 tensors of an optimizer's state, this one takes 0; use the optimizer that was saved"
    );
    let bare = self::folder("bare");
    ranks(MeshShape::default(), |device| {
        let store = StateStore::new(&bare, &device);
        store.save(&info(1), &without_bias(&device), &adamw()).unwrap();
    });
    assert_eq!(
        refusal(&bare, |device| linear(3, 4, device), &adamw),
        "FOLDER/step-000001 has no bias, which is [4] in this model; make the model as it was saved"
    );
}

/// Outside of ranks: the weights alone, all of them and no others.
#[test]
fn weights_of_others() {
    let folder = saved("weights", &[3]);
    let of = |model: &(dyn Fn(&SpDevice) -> Linear + Sync)| {
        let mut said = ranks(MeshShape::default(), |device| {
            let loaded = SavedState::open(&folder).unwrap().load_module(model(&device));
            loaded.map(|linear| parameters_by_path(&linear))
        });
        let said = said.remove(0);
        said.map_err(|error| error.to_string().replace(&folder.display().to_string(), "FOLDER"))
    };
    let loaded = of(&|device| linear(3, 4, device)).unwrap();
    let mut expected = super::model::tensors(&folder.join("step-000003"));
    expected.retain(|name, _| !name.starts_with("optimizer/"));
    assert_eq!(expected.len(), 2);
    assert_eq!(loaded, expected);

    let without_bias = |device: &SpDevice| Linear {
        bias: None,
        ..linear(3, 4, device)
    };
    assert_eq!(
        of(&without_bias).unwrap_err(),
        "FOLDER/step-000003 has bias [4], which this model has not; make the model as it was saved"
    );
    assert_eq!(
        of(&|device| linear(3, 5, device)).unwrap_err(),
        "FOLDER/step-000003: weight is [3, 4] there and [3, 5] in this model; make the model as it was saved"
    );
}

/// Saves after a step with 2 ranks and says what is said; `FOLDER` stands for the folder.
fn not_saved(folder: &Path, step: u64) -> String {
    let said = ranks(mesh(2, 1, 1), |device| {
        let store = StateStore::new(folder, &device);
        let refused = store.save(&info(step), &linear(3, 4, &device), &adamw());
        refused.unwrap_err().to_string()
    });
    assert_eq!(said[0], said[1]);
    said[0].replace(&folder.display().to_string(), "FOLDER")
}

#[test]
fn what_cannot_be_saved() {
    let folder = saved("newer", &[3, 5]);
    for step in [4, 5] {
        let said = format!(
            "FOLDER/step-000005 is there already, so step {step} would not be the newest; remove it, or save in another folder"
        );
        assert_eq!(not_saved(&folder, step), said);
    }
    let file = self::folder("file").join("file");
    fs::write(&file, "a file").unwrap();
    assert_eq!(
        not_saved(&file, 1),
        "FOLDER could not be written: File exists (os error 17); states saved before are whole"
    );
    assert_eq!(fs::read(&file).unwrap(), b"a file");
}

/// Adafactor keeps rows and columns of a matrix, which parts of it have not.
#[test]
fn states_that_cannot_be_put_together() {
    let folder = folder("rows");
    let said = ranks(MeshShape::tp(2), |device| {
        let mut layouts = ParamLayouts::replicated();
        let linear = linear(3, 4, &device);
        let linear = shard_columns(linear, Features::sharded(4, 1), &device, &mut layouts);
        let mut adafactor = AdafactorConfig::new().init();
        let linear = updated(linear, &mut adafactor, &device);
        let store = StateStore::new(&folder, &device).with_layouts(&layouts);
        store.save(&info(1), &linear, &adafactor).unwrap_err().to_string()
    });
    assert_eq!(said[0], said[1]);
    assert_eq!(
        said[0],
        "optimizer/weight/column_second_moment is [1, 2], unlike its parameter, whose parts ranks hold; share out the \
         state of an element-wise optimizer only, such as AdamW"
    );
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

/// A state that was shared out goes into an optimizer that does not share, and back: neither is of another kind.
#[test]
fn a_shared_optimizer_is_of_the_same_kind() {
    let folder = saved("kinds", &[1]);
    ranks(mesh(1, 1, 4), |device| {
        let parts = ShardedOptimizer::new(AdamWConfig::new().init());
        let store = StateStore::new(&folder, &device);
        let (linear, parts, _) = store.load(linear(3, 4, &device), parts).unwrap();
        store.save(&info(2), &linear, &parts).unwrap();
    });
    let [one, two] = ["step-000001", "step-000002"].map(|step| super::model::tensors(&folder.join(step)));
    assert_eq!(one, two);
}
