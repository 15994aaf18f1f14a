//! Plans: forecasts against what runs take, and what is recommended.

use std::process::{Command, Output};

use burn_sp_examples::flags::{self, Recompute, Shard};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::plan::{Checked, PlanFlags, Way, check, forecast, recommendation, ways};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

fn parse(line: &str) -> PlanFlags {
    flags::parse(format!("plan {line}").split_whitespace().map(Into::into)).unwrap()
}

fn plan(line: &str) -> Vec<Way> {
    ways(&parse(line)).unwrap()
}

/// What gemm keeps for a thread once it packs there: as much as an L2 cache holds, 2 MiB on some machines, which is a tenth
/// of what these small runs take.
fn scratch() -> u64 {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size").unwrap_or_default();
    let kibibytes: Option<u64> = size.trim().strip_suffix('K').and_then(|digits| digits.parse().ok());
    kibibytes.unwrap_or(0) << 10
}

/// One test for both, as the allocator's account of a rank belongs to the process.
#[test]
fn forecasts_are_near_what_was_measured() {
    let cases = [
        "--check --hidden 128 --layers 2 --heads 4 --seq-len 1024 --timeout 30",
        "--check --hidden 128 --layers 2 --heads 8 --kv-heads 2 --seq-len 1601 --shape gpt2 --dropout 0.1 --timeout 30",
        "--check --hidden 96 --layers 4 --heads 4 --seq-len 1001 --accumulate 2 --kv gather --timeout 30",
    ];
    let scratch = scratch();
    for line in cases {
        let checked = check(&parse(line), |_| ()).unwrap();
        assert!(checked.len() >= 12);
        for case in checked {
            let context = format!("{line}: {:?}", case.config);
            let without = Checked {
                measured: case.measured.saturating_sub(scratch),
                ..case.clone()
            };
            assert!(
                case.error().abs() <= 0.1 || without.error().abs() <= 0.1,
                "{context}: forecast {}, measured {}, of it {scratch} for products",
                case.forecast,
                case.measured
            );
            // Statistics of the loss, and norms, are a handful of numbers that no formula counts.
            let [forecast, measured] = [case.sent_forecast, case.sent_measured].map(|bytes| bytes as f64);
            assert!(
                (forecast - measured).abs() <= 0.01 * measured + 64.0,
                "{context}: sends {measured}, forecast {forecast}"
            );
        }
    }
}

#[test]
fn every_way_is_tried_and_the_fastest_that_fits_comes_first() {
    let line = "--ranks 4 --batch 1 --seq-len 16384 --hidden 512 --layers 8 --memory 1GiB";
    let found = plan(line);
    // dp needs a sequence a rank: the meshes of ring, ulysses and tp whose product is 4 are 6; of them one has no two
    // ranks that hold the same.
    assert_eq!(found.len(), 5 * 4 * 3 * 2 + 4 * 2);
    let budget = 1 << 30;
    let fitting = found.iter().take_while(|way| way.fits).count();
    assert!(fitting > 0 && found[fitting..].iter().all(|way| !way.fits));
    for way in &found {
        assert_eq!(way.fits, way.memory.total() <= budget);
        assert_eq!(way.fits, way.longest.unwrap() >= 16384);
        // Within 1 % of where it no longer fits.
        let total = |seq_len: usize| {
            let mut config = way.config.clone();
            config.run.seq_len = seq_len;
            forecast(&config).total()
        };
        let longest = way.longest.unwrap();
        assert!(longest == 0 || total(longest) <= budget);
        assert!(total(longest + longest / 50 + 8) > budget, "{way:?}");
    }
    assert!(found[..fitting].is_sorted_by(|a, b| a.seconds <= b.seconds));
    let reason = recommendation(&found, Some(budget));
    assert!(
        reason.contains(&format!(
            "the fastest of {fitting} ways that fit 16,384 tokens into 1.00 GiB a rank"
        )),
        "{reason}"
    );
}

/// What more of each lever does.
#[test]
fn levers_pull_the_right_way() {
    let total = |line: &str| {
        let line = format!("--hidden 256 --seq-len 8192 --batch 1 --mlp-tiles 1 --shard none --recompute none {line}");
        plan(&line)[0].memory.total()
    };
    let none = total("--ulysses 4");
    assert!(total("--ranks 1") > 3 * none);
    assert!(total("--ulysses 4 --recompute attention") < none);
    assert!(total("--ulysses 4 --recompute blocks") < total("--ulysses 4 --recompute all-but-attention"));
    assert!(total("--ulysses 4 --recompute blocks --mlp-tiles 8") < total("--ulysses 4 --recompute blocks"));
    assert!(
        total("--ulysses 4 --recompute blocks --shard parameters")
            < total("--ulysses 4 --recompute blocks --shard optimizer")
    );
    assert!(total("--ulysses 4 --recompute blocks --shard optimizer") < total("--ulysses 4 --recompute blocks"));
}

/// Given flags are kept, and slow links choose what sends least.
#[test]
fn what_is_given_is_kept() {
    for way in plan("--ring 2 --shard optimizer --memory 1GB") {
        assert_eq!((way.mesh().ring, way.mesh().ranks()), (2, 2));
        assert_eq!(way.config.learning.shard, Shard::Optimizer);
    }
    let slow = &plan("--ranks 4 --batch 4 --bandwidth 1e6")[0];
    let least = plan("--ranks 4 --batch 4").iter().map(|way| way.bytes_sent).min();
    assert_eq!(Some(slow.bytes_sent), least);
    assert_eq!(slow.config.learning.recompute, Recompute::None);
}

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plan"))
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn the_program_says_it_all() {
    let output = run(&["--ranks", "2", "--memory", "2GiB", "--seq-len", "4096"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for word in [
        "mesh",
        "recompute",
        "activations",
        "sent a step",
        "longest",
        "ring 2",
        "ulysses 2",
        "tp 2",
        "dp 2",
        "Use --",
    ] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    let nothing = run(&["--ranks", "2", "--memory", "1MiB", "--seq-len", "4096"]);
    let text = String::from_utf8(nothing.stdout).unwrap();
    assert!(text.contains("Nothing fits 4,096 tokens into 1.00 MiB"), "{text}");
}

/// The cases run one after the other, on one timeline.
#[test]
fn cases_leave_a_timeline_and_a_report() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let files = ["plan-trace.json", "plan-report.json"].map(|name| folder.join(name));
    let [trace, report] = files.each_ref().map(|file| file.to_str().unwrap());
    let tiny = ["--hidden", "16", "--layers", "1", "--heads", "4", "--seq-len", "32"];
    let output = run(&[&["--check", "--trace", trace, "--report", report], &tiny[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [trace, report] = files.map(|file| -> Vec<serde_json::Value> {
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
    });
    let begun = |name: &str| {
        trace
            .iter()
            .filter(|event| event["ph"] == "B" && event["name"] == name)
            .count()
    };
    // Two steps of each rank of each case.
    let ranks: usize = report
        .iter()
        .map(|case| case["config"]["ranks"].as_u64().unwrap() as usize)
        .sum();
    assert!(report.len() >= 12 && ranks > report.len());
    assert_eq!((begun("step 1"), begun("step 2")), (ranks, ranks));
    // None tries the held-out text.
    assert_eq!(begun("validation"), 0);
}

#[test]
fn bad_input_is_one_line() {
    for (arguments, line) in [
        (
            &["--memory", "much"][..],
            "--memory much: that is no size; use one such as 80GiB or 900MB",
        ),
        (&["--memory", "0"], "--memory 0: give it a size, such as 80GiB"),
        (&["--flops", "0"], "--flops 0: use a rate above 0, such as 4e10"),
        (&["--bandwidth", "nan"], "--bandwidth NaN: use a rate above 0"),
        (
            &["--trace", "trace.json"],
            "--trace trace.json: nothing runs without --check",
        ),
        (&["--window", "0"], "--window 0: a token sees itself at least"),
        (&["--mlp-tiles", "0"], "--mlp-tiles 0: give it at least 1"),
        (&["--heads", "7"], "--hidden 256 --heads 7"),
        (&["--ring", "4", "--seq-len", "3"], "a rank would have no token"),
    ] {
        let output = run(arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(
            text.contains(line) && text.lines().count() == 1,
            "{arguments:?}: {text}"
        );
    }
}
