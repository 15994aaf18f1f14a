//! The program that trains by Burn's own loop: the same metrics on every mesh, resumed on another, and what it refuses.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use burn_sp_examples::flags;
use burn_sp_examples::learner::{LearnerFlags, train};

const TINY: &str = "--hidden 16 --layers 1 --heads 2 --seq-len 21 --steps 3 --batch 3 --lr 0.01 --timeout 20";

fn parsed(line: &str) -> LearnerFlags {
    let line = format!("learner {TINY} {line}");
    flags::parse(line.split_whitespace().map(OsString::from)).unwrap()
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("learner").join(name);
    let _ = fs::remove_dir_all(&folder);
    folder
}

fn run(line: &str, folder: &Path) {
    let flags = parsed(&format!("{line} --folder {}", folder.display()));
    train(&flags.resolve().unwrap()).unwrap();
}

/// The loss of an epoch, which Burn writes on a thread that it does not wait for.
fn loss(folder: &Path, split: &str, epoch: usize) -> f64 {
    let file = folder.join(split).join(format!("epoch-{epoch}")).join("Loss.log");
    let start = Instant::now();
    loop {
        let text = fs::read_to_string(&file).unwrap_or_default();
        if let Some(value) = text.lines().last().and_then(|line| line.strip_suffix(",final")) {
            return value.parse().unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{}: {text}", file.display());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn losses_do_not_depend_on_the_mesh() {
    let one = folder("one");
    run("--ranks 1 --epochs 3", &one);
    assert!(loss(&one, "train", 3) < loss(&one, "train", 1));
    for (name, mesh) in [("dp-ulysses", "--dp 2 --ulysses 2"), ("ring-tp", "--ring 2 --tp 2")] {
        let other = folder(name);
        run(&format!("{mesh} --epochs 2"), &other);
        // The data are shuffled: what is resumed sees them in another order, that of a first epoch.
        run("--tp 2 --checkpoint 2 --epochs 3", &other);
        for (split, epoch) in [("train", 1), ("valid", 1), ("train", 2), ("valid", 2)] {
            let [one, other] = [&one, &other].map(|folder| loss(folder, split, epoch));
            assert!(
                (one - other).abs() <= 1e-4 * one,
                "{mesh}, {split} {epoch}: {one} and {other}"
            );
        }
        assert!(loss(&other, "train", 3) < loss(&other, "train", 1));
    }
}

#[test]
fn what_cannot_work_is_refused() {
    let nowhere = folder("nowhere");
    for (line, words) in [
        (
            "--report x.json",
            "--report, --trace: what there is to say lies in --folder",
        ),
        ("--dropout 0.1", "--dropout: it is keyed by steps"),
        ("--epochs 0", "--epochs 0"),
        ("--lr -1", "--lr"),
        ("--checkpoint 3", "--checkpoint 3: there is no "),
        ("--seq-len 3 --ring 4", "a rank would have no token"),
    ] {
        let flags = parsed(&format!("--folder {} {line}", nowhere.display()));
        let error = flags.resolve().unwrap_err().to_string();
        assert!(error.contains(words), "{line}: {error}");
    }
    assert!(!nowhere.exists());
}
