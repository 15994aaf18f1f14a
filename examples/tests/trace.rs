//! The timeline of `--trace`: a file that Perfetto opens, with every step, block and collective of every rank in it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn_sp_examples::report::Report;
use serde::Deserialize;
use serde_json::{Map, Value};

const TINY: &str = "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 61 --steps 3 --lr 0.01 --timeout 20";

/// One element of the file; a field that is missing or of another type fails the test.
#[derive(Deserialize)]
struct Event {
    name: String,
    ph: String,
    ts: Option<f64>,
    pid: usize,
    tid: usize,
    #[serde(default)]
    args: Map<String, Value>,
}

/// A span of a rank: its name after those around it, `"step 1/forward/block 0"`.
struct Span {
    rank: usize,
    path: String,
    args: Map<String, Value>,
}

fn train(arguments: &str, files: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train-transformer"));
    command
        .args(TINY.split_whitespace())
        .args(arguments.split_whitespace())
        .args(["--text", concat!(env!("CARGO_MANIFEST_DIR"), "/src/text.rs")]);
    for (flag, file) in files {
        command.arg(flag).arg(file);
    }
    command.output().unwrap()
}

fn file(name: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if file.exists() {
        fs::remove_file(&file).unwrap();
    }
    file
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The spans of a timeline, in the order of their beginnings. Every one of them ends, after those inside it.
fn spans(file: &Path, ranks: usize) -> Vec<Span> {
    let events: Vec<Event> = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let mut names = BTreeMap::new();
    let mut open: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let mut now: BTreeMap<usize, f64> = BTreeMap::new();
    let mut spans = Vec::new();
    for event in events {
        assert_eq!(event.pid, 1);
        if event.ph == "M" {
            if event.name == "thread_name" {
                let name = event.args["name"].as_str().unwrap().to_string();
                assert_eq!(names.insert(event.tid, name), None, "a track has one name");
            }
            continue;
        }
        let ts = event.ts.unwrap();
        let before = now.insert(event.tid, ts).unwrap_or(0.0);
        assert!(before <= ts, "{}: {ts} after {before}", event.name);
        let inside = open.entry(event.tid).or_default();
        match event.ph.as_str() {
            "B" => {
                inside.push(event.name);
                spans.push(Span {
                    rank: event.tid - 1,
                    path: inside.join("/"),
                    args: event.args,
                });
            }
            "E" => assert_eq!(inside.pop(), Some(event.name)),
            other => panic!("{other} is no event of a timeline"),
        }
    }
    assert!(open.values().all(Vec::is_empty), "{open:?}");
    let expected: BTreeMap<_, _> = (0..ranks).map(|rank| (rank + 1, format!("rank {rank}"))).collect();
    assert_eq!(names, expected, "tracks in the order of ranks");
    spans
}

/// How many spans of a rank have this name, inside all of these, in this order.
fn count(spans: &[Span], rank: usize, around: &[&str], name: &str) -> usize {
    let fits = |span: &&Span| {
        let mut names = span.path.split('/').rev();
        let last = names.next() == Some(name);
        let mut outside = names.rev();
        last && span.rank == rank && around.iter().all(|wanted| outside.any(|name| name == *wanted))
    };
    spans.iter().filter(fits).count()
}

/// Calls and bytes by rank, operation and axis.
type Traffic = BTreeMap<(usize, String, String), (u64, u64)>;

/// What the collectives of one phase, `"start"` or `"wait"`, add up to in training steps.
fn traffic(spans: &[Span], phase: &str) -> Traffic {
    let mut traffic = Traffic::new();
    for span in spans.iter().filter(|span| span.path.starts_with("step ")) {
        if span.args.get("phase").is_none_or(|value| value != phase) {
            continue;
        }
        let op = span.path.rsplit('/').next().unwrap().to_string();
        let axis = span.args["axis"].as_str().unwrap().to_string();
        let (calls, bytes) = traffic.entry((span.rank, op, axis)).or_default();
        *calls += 1;
        *bytes += span.args["bytes"].as_u64().unwrap();
        assert!(span.args["at"].as_str().unwrap().contains(".rs:"), "{:?}", span.args);
        assert!(span.args["call"].is_u64(), "{:?}", span.args);
    }
    traffic
}

fn reported(file: &Path) -> Traffic {
    let report: Report = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let counters = report.communication.into_iter();
    counters
        .map(|counter| {
            (
                (counter.rank, counter.op, counter.axis),
                (counter.calls, counter.bytes_sent),
            )
        })
        .collect()
}

#[test]
fn steps_blocks_and_collectives_of_all_ranks() {
    for (name, arguments, ranks, strategies) in [
        ("ulysses", "--ulysses 2", 2, vec!["ulysses", "local"]),
        ("mixed", "--ring 2 --tp 2 --shard optimizer", 4, vec!["ring"]),
    ] {
        let (trace, report) = (
            file(&format!("{name}-trace.json")),
            file(&format!("{name}-report.json")),
        );
        let output = train(arguments, &[("--trace", &trace), ("--report", &report)]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stderr(&output).contains("-trace.json"), "{}", stderr(&output));

        let spans = spans(&trace, ranks);
        let expected = reported(&report);
        assert!(!expected.is_empty());
        assert_eq!(traffic(&spans, "start"), expected, "{arguments}");
        assert_eq!(traffic(&spans, "wait"), expected, "{arguments}");

        for rank in 0..ranks {
            let once = |around: &[&str], name| assert_eq!(count(&spans, rank, around, name), 1, "{around:?} {name}");
            for step in ["step 1", "step 2", "step 3"] {
                once(&[], step);
                for name in ["forward", "backward", "clip", "optimizer"] {
                    once(&[step], name);
                }
                for block in ["block 0", "block 1"] {
                    once(&[step, "forward"], block);
                    let forward = count(&spans, rank, &[step, "forward", block], "attention forward");
                    assert_eq!(forward, strategies.len());
                }
                let backward = count(&spans, rank, &[step, "backward"], "attention backward");
                assert_eq!(backward, 2 * strategies.len());
                let sums = count(&spans, rank, &[step], "gradient sum");
                // With its state shared out, the optimizer adds up itself.
                assert_eq!(sums, usize::from(!arguments.contains("--shard")));
            }
            once(&[], "validation");
            let found = spans.iter().filter(|span| span.rank == rank);
            let mut found: Vec<_> = found.filter_map(|span| span.args.get("strategy")).collect();
            found.dedup();
            assert_eq!(found[..strategies.len()], strategies);
        }
    }
}

#[test]
fn the_file_is_whole_if_the_run_fails() {
    let trace = file("failed-trace.json");
    let output = train("--ulysses 2 --lr 1e30", &[("--trace", &trace)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("a smaller --lr"), "{}", stderr(&output));
    let spans = spans(&trace, 2);
    assert!(count(&spans, 0, &[], "step 1") == 1 && count(&spans, 1, &["step 1"], "optimizer") == 1);
}

#[test]
fn a_file_that_cannot_be_made_is_refused_before_the_run() {
    let name = file(&"x".repeat(300));
    let output = train("", &[("--trace", &name)]);
    assert_eq!(output.status.code(), Some(2));
    let (text, out) = (stderr(&output), &output.stdout);
    assert!(
        text.lines().count() == 1 && text.contains("--trace") && out.is_empty(),
        "{text}"
    );
}

/// A disk that fills up costs the timeline, not the run.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_cannot_be_written_is_reported_after_the_run() {
    let report = file("full-report.json");
    let output = train("", &[("--trace", Path::new("/dev/full")), ("--report", &report)]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("error: --trace /dev/full: No space left"), "{text}");
    assert!(!reported(&report).is_empty());
}
