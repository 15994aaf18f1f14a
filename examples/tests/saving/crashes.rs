//! What ends a program from outside: kills, and a disk that takes no more.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn_sp::train::{SavedState, saved_states};

use crate::{agree, folder, run, steps, text};

const PROGRAM: &str = env!("CARGO_BIN_EXE_train-transformer");

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The step of the newest state, whole or not.
fn newest(states: &Path) -> Option<u64> {
    let newest = saved_states(states).unwrap().pop()?;
    newest.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// Waits until a state after this one is saved.
fn wait_for_more(child: &mut Child, states: &Path, than: Option<u64>) {
    let start = Instant::now();
    while newest(states) <= than {
        assert!(start.elapsed() < PATIENCE, "no state after {than:?}");
        if let Some(status) = child.try_wait().unwrap() {
            panic!("the program ended: {status}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A run that saves after every step is killed 20 times and goes on each time: no state is lost or half, and in the end the
/// losses are those of a run that nobody killed.
#[test]
fn kills_lose_no_state() {
    let folder = folder("kills");
    let (text, states) = (text(&folder), folder.join("states"));
    let flags = format!("{text} --hidden 16 --layers 1 --ulysses 2");
    let save = format!("{flags} --save {} --save-every 1", states.display());
    // Later than a state that was just seen: at some moment of the next steps and saves.
    let delays = [0, 61, 7, 29, 3, 83, 17, 47, 1, 37, 11, 23, 5, 71, 13, 53, 2, 31, 19, 43];
    for (kill, delay) in delays.into_iter().enumerate() {
        let before = newest(&states);
        let resume = match before {
            Some(_) => format!("--resume {}", states.display()),
            None => String::new(),
        };
        let line = format!("{} {save} {resume} --steps 1000000", crate::TINY);
        let mut child = Command::new(PROGRAM)
            .args(line.split_whitespace())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_for_more(&mut child, &states, before);
        std::thread::sleep(Duration::from_millis(delay));
        let seen = newest(&states);
        child.kill().unwrap();
        child.wait().unwrap();

        let all = saved_states(&states).unwrap();
        assert!(
            newest(&states) >= seen && seen > before,
            "kill {kill}: {seen:?} is lost: {all:?}"
        );
        assert!(all.len() <= 3, "kill {kill}: {all:?}");
        for state in &all {
            if let Err(error) = SavedState::open(state) {
                panic!("kill {kill}: {error}");
            }
        }
    }
    let done = newest(&states).unwrap() as usize;
    let end = done + 2;
    let resumed = run(&format!("{save} --resume {} --steps {end}", states.display())).unwrap();
    let unbroken = run(&format!("{flags} --steps {end}")).unwrap();
    agree(&steps(&[&unbroken])[done..], &steps(&[&resumed]), "after all kills");
    // The last save has cleared up.
    let names: Vec<_> = fs::read_dir(&states)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

/// Files of this process may have 64 KiB, as on a disk that is full then.
#[test]
fn a_full_disk_ends_the_run_and_leaves_what_was_saved() {
    let folder = folder("full");
    let (text, states) = (text(&folder), folder.join("states"));
    let save = format!("{text} --ulysses 2 --save {}", states.display());
    run(&format!("{save} --steps 2")).unwrap();
    let saved = fs::read(states.join("step-000002/state.safetensors")).unwrap();
    assert!(saved.len() > 1 << 16);
    let line = format!(
        "{} {save} --resume {} --steps 4 --save-every 1",
        crate::TINY,
        states.display()
    );
    let out = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\"", PROGRAM])
        .args(line.split_whitespace())
        .output()
        .unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    let said = format!(
        "error: rank 0 failed: --save {}/.step-000003.tmp/state.safetensors could not be written: File too large (os \
         error 27); states saved before are whole",
        states.display()
    );
    assert_eq!(stderr.lines().last(), Some(said.as_str()), "{stderr}");
    assert_eq!(fs::read_dir(&states).unwrap().count(), 1);
    assert!(saved == fs::read(states.join("step-000002/state.safetensors")).unwrap());
    // With room again it goes on.
    let report = run(&format!("{save} --resume {} --steps 3", states.display())).unwrap();
    assert_eq!(report.steps[0].step, 3);
}
