//! Processes that are killed while they save.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use burn_sp_models::transformer::HuggingFace;
use burn_sp_tests::parameters_by_path;

use super::checkpoint::Family;
use crate::folder;

/// Names the folder to a process that is to be killed.
const FOLDER: &str = "BURN_SP_SAVES_TO";
const TEST: &str = "pretrained::kills::a_kill_leaves_a_whole_checkpoint";
const BEGINS: &str = "it begins to save";

/// A process that nobody kills ends by itself.
const PATIENCE: Duration = Duration::from_secs(60);

fn place(parent: &Path) -> PathBuf {
    parent.join("model")
}

/// The two versions, one in one file, the other in several.
fn versions(parent: &Path) -> [HuggingFace; 2] {
    ["one", "several"].map(|name| HuggingFace::open(parent.join(name)).unwrap())
}

/// Saves one version after the other, all the time.
fn save(parent: &Path) {
    let versions = versions(parent);
    let models = versions
        .each_ref()
        .map(|checkpoint| checkpoint.load(&Device::flex()).unwrap());
    let start = Instant::now();
    println!("{BEGINS}");
    while start.elapsed() < PATIENCE {
        for (checkpoint, model) in versions.iter().zip(&models) {
            checkpoint.save(model, place(parent)).unwrap();
        }
    }
}

#[test]
fn a_kill_leaves_a_whole_checkpoint() {
    if let Some(parent) = std::env::var_os(FOLDER) {
        return save(Path::new(&parent));
    }
    let parent = folder("kills");
    fs::rename(Family::Llama.checkpoint("kills"), parent.join("one")).unwrap();
    let one = HuggingFace::open(parent.join("one")).unwrap();
    let several = HuggingFace::new(one.config()).unwrap().with_shard_size(100_000);
    let other = one.config().init(&Device::flex());
    for place in [parent.join("several"), place(&parent)] {
        several.save(&other, place).unwrap();
    }
    let known = [one.load(&Device::flex()).unwrap(), other].map(|model| parameters_by_path(&model));

    let (mut kills, mut meanwhile) = (0, 0);
    while meanwhile < 20 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([TEST, "--exact", "--nocapture"])
            .env(FOLDER, &parent)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        assert!(lines.any(|line| line.ends_with(BEGINS)), "kill {kills}: it ended");
        // At another moment of a save than the last time.
        std::thread::sleep(Duration::from_micros(1300 * kills));
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        // Something beside the place: it was saving.
        meanwhile += u32::from(parent.join(".model.tmp").exists() || parent.join(".model.old").exists());
        let found = HuggingFace::open(place(&parent)).and_then(|checkpoint| checkpoint.load(&Device::flex()));
        let found = parameters_by_path(&found.unwrap_or_else(|error| panic!("kill {kills}: {error}")));
        assert!(known.contains(&found), "kill {kills}: it is neither");
        assert!(kills < 100, "only {meanwhile} kills came while it saved");
    }
    // The next save clears up.
    several
        .save(&one.load(&Device::flex()).unwrap(), place(&parent))
        .unwrap();
    let mut names: Vec<_> = fs::read_dir(&parent)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["model", "one", "several"]);
}
