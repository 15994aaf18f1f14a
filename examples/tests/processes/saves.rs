//! Training state and faults: nothing that was saved is lost, and every process says what went wrong.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use burn_sp::train::{SavedState, saved_states};

use crate::{PATIENCE, Run, TINY, folder, rounds, text};

const RANKS: usize = 4;

/// Flags that name a text, which no one edits, and where states go.
fn flags(folder: &Path) -> String {
    let (text, states) = (text(folder), folder.join("states"));
    let text = text.display();
    format!(
        "{TINY} --batch 2 --text {text} --save {} --save-every 1",
        states.display()
    )
}

/// The step of the newest state, whole or not.
fn newest(states: &Path) -> u64 {
    let newest = saved_states(states).unwrap().pop();
    let step = newest.and_then(|state| state.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok());
    step.unwrap_or(0)
}

fn await_state(run: &mut Run, states: &Path, after: u64) {
    let begin = Instant::now();
    while newest(states) <= after {
        let ended = run.mpirun.try_wait().unwrap();
        assert!(
            ended.is_none() && begin.elapsed() < 4 * PATIENCE,
            "no state after {after}: {}",
            run.all()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every run is killed while it saves every step, and the next goes on on another mesh.
#[test]
fn kills_lose_no_state() {
    let folder = folder("kills");
    let (flags, states) = (flags(&folder), folder.join("states"));
    fs::create_dir_all(&states).unwrap();
    let meshes = [
        "--ulysses 4",
        "--dp 2 --tp 2",
        "--ring 4 --shard optimizer",
        "--ulysses 4 --shard parameters",
    ];
    let delays = [0, 7, 3, 17, 29, 1, 11, 23];
    for round in 0..rounds().max(4) {
        let before = newest(&states);
        let resume = if before > 0 {
            format!("--resume {}", states.display())
        } else {
            String::new()
        };
        let line = format!("{flags} {resume} --steps 1000000 {}", meshes[round % 4]);
        let mut run = Run::start(&folder, RANKS, &line);
        await_state(&mut run, &states, before);
        std::thread::sleep(Duration::from_millis(delays[round % delays.len()]));
        let (seen, rank) = (newest(&states), round % RANKS);
        run.signal(rank, "KILL");
        let died = format!("rank {rank} has died");
        run.fails((0..RANKS).filter(|other| *other != rank), &[&died]);

        assert!(
            newest(&states) >= seen && seen > before,
            "round {round}: {seen} is lost"
        );
        for state in saved_states(&states).unwrap() {
            if let Err(error) = SavedState::open(&state) {
                panic!("round {round}: {error}");
            }
        }
    }
    // It goes on to its end.
    let end = newest(&states) + 2;
    let line = format!("{flags} --resume {} --steps {end} --ulysses 4", states.display());
    let mut run = Run::start(&folder, RANKS, &line);
    assert!(run.end().success(), "{}", run.all());
    assert_eq!(newest(&states), end);
}

/// The files of rank 0 may have 16 KiB, as on a disk that is full then.
#[test]
fn a_full_disk_is_reported_by_every_rank() {
    for _ in 0..rounds() {
        let folder = folder("full");
        let (flags, states) = (flags(&folder), folder.join("states"));
        fs::create_dir_all(&states).unwrap();
        let mut run = Run::start(&folder, RANKS, &format!("{flags} --steps 1 --ulysses 4"));
        assert!(run.end().success(), "{}", run.all());
        let saved = fs::read(states.join("step-000001/state.safetensors")).unwrap();

        let line = format!("{flags} --resume {} --steps 9 --ulysses 4", states.display());
        let full = "[ $RANK = 0 ] && trap '' XFSZ && ulimit -f 32";
        let mut run = Run::start_with(&folder, RANKS, &line, full);
        let words = [
            "rank 0 failed: --save ",
            "could not be written: File too large",
            "states saved before are whole",
        ];
        run.fails(0..RANKS, &words);
        assert_eq!(fs::read_dir(&states).unwrap().count(), 1);
        assert!(saved == fs::read(states.join("step-000001/state.safetensors")).unwrap());
    }
}

#[test]
fn a_damaged_state_ends_all_ranks() {
    for round in 0..rounds() {
        let folder = folder("damaged");
        let (flags, states) = (flags(&folder), folder.join("states"));
        fs::create_dir_all(&states).unwrap();
        let mut run = Run::start(&folder, RANKS, &format!("{flags} --steps 1 --ulysses 4"));
        assert!(run.end().success(), "{}", run.all());

        let file = states.join("step-000001/state.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        match round % 2 {
            0 => bytes.truncate(middle),
            _ => bytes[middle] ^= 1,
        }
        fs::write(&file, bytes).unwrap();
        let line = format!("{flags} --resume {} --steps 9 --ulysses 4", states.display());
        let mut run = Run::start(&folder, RANKS, &line);
        // Only rank 0 reads it, before any rank starts; its launcher ends the others.
        run.fails([0], &["--resume ", "step-000001"]);
        run.fails(1..RANKS, &["rank ", "was ended by SIGTERM"]);
    }
}
