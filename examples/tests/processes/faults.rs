//! What can happen to a process, or to all of them.

use std::process::Command;

use crate::{PATIENCE, PROGRAM, Run, TINY, folder, moment, rounds};

const RANKS: usize = 4;

fn endless(mesh: &str) -> String {
    format!("{TINY} --steps 1000000 {mesh}")
}

fn others(rank: usize) -> impl Iterator<Item = usize> {
    (0..RANKS).filter(move |other| *other != rank)
}

#[test]
fn a_killed_process_is_named_by_the_others() {
    let meshes = ["--ulysses 4", "--ring 4", "--ring 2 --ulysses 2", "--tp 4"];
    for round in 0..rounds().max(4) {
        // Rank 0 too, through which the others are told of each other.
        let (rank, mesh) = (round % RANKS, meshes[round / RANKS % meshes.len()]);
        let mut run = Run::start(&folder("killed"), RANKS, &endless(mesh));
        run.await_steps(1);
        std::thread::sleep(moment(round));
        run.signal(rank, "KILL");
        run.fails(others(rank), &[&format!("rank {rank} has died")]);
    }
}

#[test]
fn a_process_that_stalls_is_late() {
    for round in 0..rounds() {
        let rank = 1 + round % 3;
        let mut run = Run::start(&folder("stalled"), RANKS, &endless("--ulysses 4"));
        run.await_steps(1);
        std::thread::sleep(moment(round));
        run.signal(rank, "STOP");
        let late = format!("rank {rank}: does not answer");
        run.fails(others(rank), &["timeout: ", "waited 4000 ms in ", "waiting in ", &late]);
    }
}

#[test]
fn a_stalled_first_rank_is_late_too() {
    for round in 0..rounds() {
        let mut run = Run::start(&folder("stalled-first"), RANKS, &endless("--ring 4"));
        run.await_steps(1);
        std::thread::sleep(moment(round));
        run.signal(0, "STOP");
        run.fails(
            others(0),
            &["timeout: ", "waited 4000 ms in ", "rank 0 does not answer"],
        );
    }
}

#[test]
fn a_rank_with_another_configuration_is_named() {
    for _ in 0..rounds() {
        let other = "[ $RANK = 2 ] && set -- \"$@\" --lr 0.002";
        let mut run = Run::start_with(&folder("configuration"), RANKS, &endless("--ulysses 4"), other);
        let words = ["different configurations: lr is 0.001 on rank 0 and 0.002 on rank 2"];
        run.fails(0..RANKS, &words);
    }
}

/// The same flags, but what they name is not the same.
#[test]
fn a_rank_with_another_text_is_named() {
    let folder = folder("text");
    for (place, line) in [("here", "sun and moon\n"), ("there", "sun and star\n")] {
        std::fs::create_dir(folder.join(place)).unwrap();
        std::fs::write(folder.join(place).join("text.txt"), line.repeat(400)).unwrap();
    }
    let flags = endless("--ulysses 4 --text text.txt");
    let own = "exec 2> errors.$RANK; if [ $RANK = 3 ]; then cd there; else cd here; fi; exec \"$@\"";
    let mut run = Run::start_with(&folder, RANKS, &flags, own);
    let words = [
        "different configurations: data is \"5200 bytes, hash ",
        " on rank 0 and \"5200 bytes, hash ",
        "rank 3",
    ];
    run.fails(0..RANKS, &words);
}

#[test]
fn a_rank_of_another_mesh_is_refused_or_named() {
    for _ in 0..rounds() {
        let other = "[ $RANK = 1 ] && set -- \"$@\" --ulysses 1 --ring 4";
        let mut run = Run::start_with(&folder("mesh"), RANKS, &endless("--ulysses 4"), other);
        run.fails(
            0..RANKS,
            &["different configurations: ring is 1 on rank 0 and 4 on rank 1"],
        );
    }
}

#[test]
fn whoever_ends_the_launcher_gets_a_report_of_all() {
    for round in 0..rounds() {
        let mut run = Run::start(&folder("ended"), RANKS, &endless("--ulysses 4"));
        run.await_steps(1);
        std::thread::sleep(moment(round));
        run.signal_process(&run.mpirun.id().to_string(), "TERM");
        run.fails(0..RANKS, &["ended by SIG"]);
    }
}

#[test]
fn ranks_that_are_no_processes_are_refused() {
    let mut run = Run::start(&folder("two"), 2, &endless("--ulysses 4"));
    run.fails(
        0..2,
        &["mesh: ulysses 4 needs 4 processes, but 2 were started; start 4"],
    );
    // Without a launcher there is one process.
    let alone = |line: &str| {
        let output = Command::new(PROGRAM).args(line.split_whitespace()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, errors) = alone("--engine mpi --ulysses 4");
    assert_eq!(code, Some(2));
    assert!(
        errors.contains("mesh: ulysses 4 needs 4 processes, but 1 was started; start 4"),
        "{errors}"
    );
    let (code, errors) = alone(&format!("--engine mpi {TINY} --steps 1 --timeout 60"));
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_healthy_run_ends_well() {
    let mut run = Run::start(&folder("healthy"), RANKS, &format!("{TINY} --steps 2 --ulysses 4"));
    let begin = std::time::Instant::now();
    assert!(run.end().success(), "{}", run.all());
    assert!(begin.elapsed() < PATIENCE);
    // Only one of them talks.
    for rank in 1..RANKS {
        assert_eq!(run.errors(rank), "");
    }
}
