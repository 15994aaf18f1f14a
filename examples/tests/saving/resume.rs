use std::fs;
use std::path::Path;

use burn_sp::train::saved_states;

use crate::{agree, folder, run, run_video, steps, text, tokens};

/// Saved after 3 of 6 steps, on each of these, and continued on all others.
#[test]
fn a_language_model_goes_on_on_any_mesh() {
    let meshes = [
        "--ranks 1",
        "--ulysses 2 --shard optimizer",
        "--dp 2 --ring 2 --shard parameters",
        "--tp 2 --ulysses 2 --shard optimizer",
    ];
    for shape in ["--shape llama", "--shape gpt2"] {
        let folder = folder(&format!("language{}", &shape[8..]));
        let text = text(&folder);
        let unbroken = run(&format!("{shape} {text} --ranks 1 --steps 6 --accumulate 2")).unwrap();
        for (number, mesh) in meshes.iter().enumerate() {
            let states = folder.join(number.to_string());
            let flags = format!("{shape} {text} --accumulate 2");
            let first = run(&format!("{flags} {mesh} --steps 3 --save {}", states.display())).unwrap();
            for then in meshes {
                let second = run(&format!("{flags} {then} --steps 6 --resume {}", states.display())).unwrap();
                let what = format!("{shape}, {mesh}, then {then}");
                agree(&steps(&[&unbroken]), &steps(&[&first, &second]), &what);
                let [one, other] = [&unbroken, &second].map(|report| report.validation_loss.unwrap());
                assert!((one - other).abs() <= 1e-5 * one, "{what}: {one} and {other}");
            }
        }
    }
}

/// Saved on 4 ranks after step 10 of 20, continued on 1, 2 and 4 on other meshes; on bytes, and on packed tokens, of which an
/// epoch ends in between.
#[test]
fn ten_more_steps_are_those_of_the_unbroken_run() {
    for (name, data) in [("bytes", text as fn(&Path) -> String), ("packed", tokens)] {
        let folder = folder(&format!("ten-{name}"));
        let states = folder.join("states");
        let flags = format!("{} --batch 4 --lr 0.003", data(&folder));
        let save = format!("--steps 20 --save-every 10 --save {}", states.display());
        let unbroken = run(&format!("{flags} --dp 2 --ring 2 {save}")).unwrap();
        for then in [
            "--ranks 1",
            "--ring 2",
            "--dp 2 --shard parameters",
            "--tp 2 --ulysses 2",
            "--dp 4 --shard optimizer",
            "--ring 4",
        ] {
            let ten = states.join("step-000010");
            let second = run(&format!("{flags} {then} --steps 20 --resume {}", ten.display())).unwrap();
            let what = format!("{name}, then {then}");
            agree(&steps(&[&unbroken])[10..], &steps(&[&second]), &what);
        }
    }
}

#[test]
fn a_video_model_goes_on_on_any_mesh() {
    let folder = folder("video");
    let states = folder.join("states");
    let meshes = [
        "--ranks 1",
        "--ring 2 --ulysses 2 --shard optimizer",
        "--tp 2 --shard parameters",
    ];
    let unbroken = run_video("--ranks 1 --steps 4").unwrap();
    let first = run_video(&format!(
        "--ring 2 --shard parameters --steps 2 --save {}",
        states.display()
    ))
    .unwrap();
    for then in meshes {
        let second = run_video(&format!("{then} --steps 4 --resume {}", states.display())).unwrap();
        agree(&steps(&[&unbroken]), &steps(&[&first, &second]), then);
    }
}

/// After every so many steps and after the last; resumed into the same folder, which keeps two.
#[test]
fn states_are_saved_when_they_are_due() {
    let folder = folder("due");
    let (text, states) = (text(&folder), folder.join("states"));
    let found = || {
        let names = saved_states(&states).unwrap().into_iter();
        let names = names.map(|state| state.file_name().unwrap().to_str().unwrap().to_owned());
        names.collect::<Vec<String>>()
    };
    let save = format!("{text} --ranks 2 --save {}", states.display());
    run(&format!("{save} --steps 5 --save-every 2")).unwrap();
    assert_eq!(found(), ["step-000004", "step-000005"]);
    let resume = format!("--resume {}", states.display());
    let report = run(&format!("{save} {resume} --steps 7")).unwrap();
    assert_eq!(report.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [6, 7]);
    assert_eq!(found(), ["step-000005", "step-000007"]);
    // What is saved does not count for the step: nothing but training is in the report.
    let plain = run(&format!("{text} --ranks 2 --steps 2")).unwrap();
    let calls = |report: &burn_sp_examples::report::Report| {
        let counters = report.communication.iter();
        counters
            .map(|counter| (counter.op.clone(), counter.axis.clone(), counter.calls))
            .collect::<Vec<_>>()
    };
    assert_eq!(calls(&plain), calls(&report));
    // It is the flags' and no part of the run.
    assert_eq!(plain.config, {
        let mut config = report.config.clone();
        config["steps"] = 2.into();
        config
    });
    fs::remove_dir_all(&folder).unwrap();
}
