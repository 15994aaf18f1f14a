//! Training state of the programs: a run that was saved goes on as if it had not ended, whatever ended it.

mod crashes;
mod memory;
mod refusals;
mod resume;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn_sp_examples::RunError;
use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::Report;
use burn_sp_examples::train::train;
use burn_sp_examples::train_video::{self, VideoTrainFlags};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

/// The allocator's account of a rank belongs to the process: runs come one after another.
static ALONE: Mutex<()> = Mutex::new(());

const TINY: &str = "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 61 --batch 3 --lr 0.01 --dropout 0.1";

const TINY_VIDEO: &str =
    "--hidden 32 --layers 2 --heads 2 --height 16 --patch 8 --frames 5 --lr 0.01 --batch 2 --timeout 60";

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("saving").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Flags that name a text, which no one edits.
fn text(folder: &Path) -> String {
    let file = folder.join("text.txt");
    let words = (0..4000u64).map(|i| ["sun ", "moon ", "star ", "sky\n"][(i * i % 11 % 4) as usize]);
    fs::write(&file, words.collect::<String>()).unwrap();
    format!("--text {}", file.display())
}

/// Flags that name the same text in tokens, its documents, which end with the word "sky", packed.
fn tokens(folder: &Path) -> String {
    let file = folder.join("tokenizer.json");
    let vocabulary = r#"{"sun": 0, "moon": 1, "star": 2, "</s>": 3}"#;
    let tokenizer = format!(
        r#"{{"version": "1.0", "pre_tokenizer": {{"type": "WhitespaceSplit"}},
        "model": {{"type": "WordLevel", "vocab": {vocabulary}, "unk_token": "</s>"}}}}"#
    );
    fs::write(&file, tokenizer).unwrap();
    format!(
        "{} --tokenizer {} --document-separator sky --eos </s> --pack",
        text(folder),
        file.display()
    )
}

/// Trains a language model by these flags.
fn run(line: &str) -> Result<Report, RunError> {
    let line = format!("train-transformer {TINY} {line}");
    let flags: TrainFlags = flags::parse(line.split_whitespace().map(OsString::from))?;
    let config = flags.resolve()?;
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    train(&config, &Progress::quiet())
}

/// Trains a video model by these flags.
fn run_video(line: &str) -> Result<Report, RunError> {
    let line = format!("train-video-dit {TINY_VIDEO} {line}");
    let flags: VideoTrainFlags = flags::parse(line.split_whitespace().map(OsString::from))?;
    let config = flags.resolve()?;
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    train_video::train(&config, &Progress::quiet())
}

/// Step numbers, losses and gradient norms.
fn steps(reports: &[&Report]) -> Vec<(usize, f64, f64)> {
    let steps = reports.iter().flat_map(|report| &report.steps);
    steps.map(|step| (step.step, step.loss, step.grad_norm)).collect()
}

/// The same steps, and losses and norms but for rounding.
#[track_caller]
fn agree(unbroken: &[(usize, f64, f64)], resumed: &[(usize, f64, f64)], what: &str) {
    assert_eq!(unbroken.len(), resumed.len(), "{what}");
    for (one, other) in unbroken.iter().zip(resumed) {
        assert_eq!(one.0, other.0, "{what}");
        assert!((one.1 - other.1).abs() <= 1e-5 * one.1, "{what}: {one:?} and {other:?}");
        assert!((one.2 - other.2).abs() <= 1e-4 * one.2, "{what}: {one:?} and {other:?}");
    }
}
