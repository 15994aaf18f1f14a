//! Training from a Hugging Face checkpoint, and to one.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn_sp::train::SavedState;
use burn_sp_examples::RunError;
use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::Report;
use burn_sp_examples::train::train;
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

/// The allocator's account of a rank belongs to the process: runs come one after another.
static ALONE: Mutex<()> = Mutex::new(());

const SIZE: &str = "--hidden 32 --layers 2 --heads 4";
const RUN: &str = "--seq-len 21 --batch 2 --lr 0.01 --timeout 60";

/// An empty folder of a test's own, with a text in it.
fn folder(name: &str) -> (PathBuf, String) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fine-tuning").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("text.txt");
    let words = (0..4000u64).map(|i| ["sun ", "moon ", "star ", "sky\n"][(i * i % 11 % 4) as usize]);
    fs::write(&file, words.collect::<String>()).unwrap();
    let text = format!("--text {}", file.display());
    (folder, text)
}

fn run(line: &str) -> Result<Report, RunError> {
    let line = format!("train-transformer {RUN} {line}");
    let flags: TrainFlags = flags::parse(line.split_whitespace().map(OsString::from))?;
    let config = flags.resolve()?;
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    train(&config, &Progress::quiet())
}

#[track_caller]
fn refused(line: &str, words: &[&str]) {
    let Err(error) = run(line) else {
        panic!("{line} is not refused");
    };
    let said = error.to_string();
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in: {said}");
    }
}

fn losses(report: &Report) -> Vec<f64> {
    report.steps.iter().map(|step| step.loss).collect()
}

#[track_caller]
fn agree(one: &[f64], other: &[f64], what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (one, other) in one.iter().zip(other) {
        assert!((one - other).abs() <= 1e-5 * one, "{what}: {one} and {other}");
    }
}

/// A checkpoint made by the program, and what `config.json` says otherwise.
fn checkpoint(folder: &Path, text: &str, shape: &str, settings: &[(&str, Value)]) -> PathBuf {
    let place = folder.join(format!("checkpoint-{}", fs::read_dir(folder).unwrap().count()));
    let kv = if shape == "llama" { "--kv-heads 2" } else { "" };
    run(&format!(
        "{SIZE} {kv} --shape {shape} {text} --steps 2 --export {}",
        place.display()
    ))
    .unwrap();
    let file = place.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    for (key, value) in settings {
        config[key] = value.clone();
    }
    fs::write(&file, config.to_string()).unwrap();
    place
}

/// With a learning rate that is 0 in f32 what goes in comes out, to the byte, whatever the ranks share; and what is known of the model
/// elsewhere stays.
#[test]
fn what_is_not_trained_comes_out_as_it_went_in() {
    for shape in ["llama", "gpt2"] {
        let (folder, text) = folder(&format!("same-{shape}"));
        let from = checkpoint(
            &folder,
            &text,
            shape,
            &[("eos_token_id", json!(3)), ("mine", json!("kept"))],
        );
        let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        for (number, mesh) in [
            "--ranks 1",
            "--tp 2",
            "--tp 4",
            "--ulysses 2 --shard parameters",
            "--dp 2 --tp 2",
        ]
        .into_iter()
        .enumerate()
        {
            let to = folder.join(format!("out-{number}"));
            let line = format!(
                "{text} {mesh} --lr 1e-60 --steps 1 --pretrained {} --export {}",
                from.display(),
                to.display()
            );
            let report = run(&line).unwrap();
            assert_eq!(report.config["hidden"], 32, "{shape}, {mesh}");
            assert!(weights(&from) == weights(&to), "{shape}, {mesh}");
            let config: Value = serde_json::from_slice(&fs::read(to.join("config.json")).unwrap()).unwrap();
            assert_eq!((&config["eos_token_id"], &config["mine"]), (&json!(3), &json!("kept")));
            let length = ["max_position_embeddings", "n_positions"].map(|key| &config[key]);
            assert!(length.contains(&&json!(21)), "{shape}: {length:?}");
        }
    }
}

/// A model that is none of the program's own: its rotary base, epsilon and width of a head are those of the checkpoint, also
/// in a run that is resumed.
#[test]
fn a_checkpoints_own_settings_hold() {
    let (folder, text) = folder("settings");
    let plain = checkpoint(&folder, &text, "llama", &[]);
    let of = |place: &Path, line: &str| {
        let line = format!("{text} --pretrained {} {line}", place.display());
        run(&line)
    };
    let before = losses(&of(&plain, "--steps 4").unwrap());
    let other = checkpoint(
        &folder,
        &text,
        "llama",
        &[("rope_theta", json!(7.0)), ("rms_norm_eps", json!(0.5))],
    );
    let unbroken = losses(&of(&other, "--steps 4").unwrap());
    assert!(
        (before[0] - unbroken[0]).abs() > 1e-3 * before[0],
        "{before:?} {unbroken:?}"
    );
    // It has learnt already.
    assert!(before[0] < 5.2, "{before:?}");

    let states = folder.join("states");
    let first = losses(&of(&other, &format!("--tp 2 --steps 2 --save {}", states.display())).unwrap());
    let resumed = of(
        &other,
        &format!("--ring 2 --ulysses 2 --steps 4 --resume {}", states.display()),
    )
    .unwrap();
    agree(&unbroken, &[first, losses(&resumed)].concat(), "resumed");
    let state = SavedState::open(&states).unwrap();
    assert_eq!(state.info().config["transformer"]["epsilon"], 0.5);

    refused(
        &format!("{text} {SIZE} --kv-heads 2 --steps 4 --resume {}", states.display()),
        &["--resume", "with --pretrained", "without --pretrained"],
    );
    refused(
        &format!(
            "{text} --pretrained {} --steps 4 --resume {}",
            plain.display(),
            states.display()
        ),
        &["--resume", "another model", "epsilon"],
    );
}

#[test]
fn what_cannot_work_is_refused() {
    let (folder, text) = folder("refusals");
    let llama = checkpoint(&folder, &text, "llama", &[]);
    let from = format!("{text} --steps 1 --pretrained {}", llama.display());
    refused(
        &format!("{from} --hidden 64"),
        &["--hidden 64", "has 32", "leave it out"],
    );
    refused(&format!("{from} --shape gpt2"), &["--shape", "leave it out"]);
    refused(
        &format!("{text} --pretrained {}/none", folder.display()),
        &["--pretrained", "none/config.json"],
    );
    let export = format!("{text} {SIZE} --steps 1 --export");
    refused(
        &format!("{export} {}", folder.display()),
        &["--export", "text.txt", "save elsewhere"],
    );
    refused(
        &format!("{export} {}/a/b", folder.display()),
        &["--export", "is no folder; make it first"],
    );
    refused(
        &format!("{export} {}/text.txt", folder.display()),
        &["--export", "that is a file"],
    );
    refused(
        &format!("{export} {}/out --window 4", folder.display()),
        &["--window --export", "leave one out"],
    );
    let other = checkpoint(&folder, &text, "llama", &[("vocab_size", json!(300))]);
    refused(
        &format!("{text} --steps 1 --pretrained {}", other.display()),
        &["no tokenizer.json", "300"],
    );
    let gpt2 = checkpoint(&folder, &text, "gpt2", &[]);
    refused(
        &format!("{text} --steps 1 --seq-len 22 --pretrained {}", gpt2.display()),
        &["--seq-len 22", "knows 21 positions"],
    );
}
