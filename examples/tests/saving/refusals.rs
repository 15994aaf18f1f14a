//! What a run cannot go on from, or save over, in one line and before any rank starts.

use std::fs;
use std::path::{Path, PathBuf};

use burn_sp_examples::RunError;
use burn_sp_examples::measure::MeasureFlags;

use crate::{folder, run, run_video, text};

/// What is said instead of training; `FOLDER` stands for the folder.
#[track_caller]
fn refusal<T>(folder: &Path, outcome: Result<T, RunError>) -> String {
    let Err(error) = outcome else {
        panic!("it is not refused");
    };
    assert!(matches!(error, RunError::Input(_)) && error.exit_code() == 2, "{error}");
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    error.replace(&folder.display().to_string(), "FOLDER")
}

/// A folder with states after steps 2 and 3, and the flags of the run.
fn saved(name: &str) -> (PathBuf, String) {
    let folder = folder(name);
    let text = text(&folder);
    let states = folder.join("states");
    run(&format!(
        "{text} --ranks 1 --steps 3 --save-every 2 --save {}",
        states.display()
    ))
    .unwrap();
    (states, text)
}

#[test]
fn flags_that_cannot_work() {
    let folder = folder("flags");
    fs::write(folder.join("file"), "").unwrap();
    let said = |line: &str| refusal(&folder, run(&line.replace("FOLDER", &folder.display().to_string())));
    for (line, expected) in [
        ("--save-every 2", "--save-every 2: give --save, a folder, too"),
        (
            "--save FOLDER --save-every 0",
            "--save-every 0: use at least 1, or leave it out for after the last step",
        ),
        (
            "--save FOLDER/file",
            "--save FOLDER/file: that is a file; name a folder",
        ),
        (
            "--save FOLDER/none/states",
            "--save FOLDER/none/states: FOLDER/none is no folder; make it first",
        ),
        (
            "--resume FOLDER/none",
            "--resume FOLDER/none does not exist; name a folder that states were saved in, or one of its step-... folders",
        ),
        (
            "--resume FOLDER",
            "--resume FOLDER holds no training state; name a folder that states were saved in, or one of its step-... \
             folders",
        ),
    ] {
        assert_eq!(said(line), expected, "{line}");
    }
}

#[test]
fn runs_of_another_kind() {
    let (states, text) = saved("kinds");
    let resume = format!("{text} --ranks 1 --resume {}", states.display());
    let said = |line: &str| refusal(&states, run(&format!("{resume} {line}")));
    let differs = |saved: &str, this: &str| {
        format!(
            "--resume FOLDER/step-000003: it was saved {saved}, and this run is {this}; give the same, or start anew \
             without --resume"
        )
    };
    for (line, expected) in [
        ("--seed 8", differs("with --seed 7", "with --seed 8")),
        ("--hidden 64", differs("with --ffn 96", "with --ffn 176")),
        ("--shape gpt2", differs("with --ffn 96", "with --ffn 128")),
        ("--shape gpt2 --ffn 96", differs("with --shape llama", "with --shape gpt2")),
        ("--window 9", differs("without --window", "with --window 9")),
        ("--dropout 0.2", differs("with --dropout 0.1", "with --dropout 0.2")),
        ("--batch 4", differs("with --batch 3", "with --batch 4")),
        ("--accumulate 2", differs("with --accumulate 1", "with --accumulate 2")),
        ("--seq-len 60", differs("with --seq-len 61", "with --seq-len 60")),
        (
            "--steps 3",
            "--steps 3: FOLDER/step-000003 has done 3 already; use --steps 4 or more, as they are counted from the start"
                .into(),
        ),
    ] {
        assert_eq!(said(line), expected, "{line}");
    }
    // Where a run may differ.
    let other = "--ulysses 2 --recompute blocks --lr 0.001 --clip 0 --timeout 50";
    run(&format!("{text} --resume {} --steps 4 {other}", states.display())).unwrap();
    let video = run_video(&format!("--ranks 1 --resume {}", states.display()));
    assert_eq!(
        refusal(&states, video),
        "--resume FOLDER/step-000003: train-transformer saved it, and this is train-video-dit; resume it with that program"
    );
}

/// Not the same under another name.
#[test]
fn runs_on_other_data() {
    let (states, _) = saved("data");
    let above = states.parent().unwrap();
    let resume = format!("--ranks 1 --steps 4 --resume {}", states.display());
    let moved = above.join("moved.txt");
    fs::rename(above.join("text.txt"), &moved).unwrap();
    let length = fs::metadata(&moved).unwrap().len();
    run(&format!("{resume} --text {}", moved.display())).unwrap();
    let said = |line: &str| refusal(&states, run(&format!("{resume} {line}")));
    let were = format!("--resume FOLDER/step-000003: the data were {length} bytes, hash ");
    let ends = |rest: &str| format!("{rest}; give the same, or start anew without --resume");
    let other = fs::read_to_string(&moved).unwrap().replacen("sun", "sin", 1);
    fs::write(&moved, other).unwrap();
    let error = said(&format!("--text {}", moved.display()));
    assert!(
        error.starts_with(&were) && error.contains(&format!(", and are {length} bytes, hash ")),
        "{error}"
    );
    assert!(error.ends_with(&ends("")), "{error}");
    let error = said("");
    let default = "; without --text they are this workspace's sources, which change";
    assert!(error.starts_with(&were) && error.ends_with(&ends(default)), "{error}");
}

#[test]
fn damaged_states_are_not_passed_over() {
    let (states, text) = saved("damaged");
    let file = states.join("step-000003/state.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let whole = bytes.len();
    fs::write(&file, &bytes[..whole / 2]).unwrap();
    let resume = |from: &Path| run(&format!("{text} --ranks 1 --steps 4 --resume {}", from.display()));
    assert_eq!(
        refusal(&states, resume(&states)),
        format!(
            "--resume FOLDER/step-000003 is damaged: state.safetensors has {} bytes, not {whole}; FOLDER/step-000002 is \
             whole: name it to go on from there",
            whole / 2
        )
    );
    bytes[whole / 2] ^= 4;
    fs::write(&file, &bytes).unwrap();
    let said = refusal(&states, resume(&states));
    assert!(
        said.starts_with("--resume FOLDER/step-000003 is damaged: the checksum of state.safetensors is "),
        "{said}"
    );
    // As it says.
    assert_eq!(resume(&states.join("step-000002")).unwrap().steps[0].step, 3);
}

#[test]
fn states_of_other_runs_are_not_mixed() {
    let (states, text) = saved("mixed");
    let run = |from: Option<&Path>| {
        let resume = from
            .map(|from| format!("--resume {}", from.display()))
            .unwrap_or_default();
        run(&format!(
            "{text} --ranks 1 --steps 4 {resume} --save {}",
            states.display()
        ))
    };
    let said = "--save FOLDER: FOLDER/step-000003 is there already, and this run does not go on from it; --resume it, or \
                save in another folder";
    assert_eq!(refusal(&states, run(None)), said);
    assert_eq!(refusal(&states, run(Some(&states.join("step-000002")))), said);
    run(Some(&states.join("step-000003"))).unwrap();
}

/// They start from the same weights again and again.
#[test]
fn programs_without_state_refuse_the_flags() {
    let mut flags = MeasureFlags::default();
    flags.train.state.resume = Some("states".into());
    let error = flags.resolve().unwrap_err().to_string();
    assert_eq!(error, "--resume: measure keeps no training state; leave it out");
}
