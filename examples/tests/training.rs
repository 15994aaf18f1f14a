//! A few steps of a tiny model: the same losses on every mesh, and a report that says all it should.

use std::ffi::OsString;
use std::path::Path;

use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::{Report, write_json};
use burn_sp_examples::{summary::summary, train::train};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

const TINY: &str =
    "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 61 --steps 3 --lr 0.01 --dropout 0.1 --timeout 20";

fn run(line: &str) -> Report {
    let line = format!("train-transformer {TINY} {line}");
    let flags: TrainFlags = flags::parse(line.split_whitespace().map(OsString::from)).unwrap();
    train(&flags.resolve().unwrap(), &Progress::quiet()).unwrap()
}

fn losses(report: &Report) -> Vec<f64> {
    let steps = report.steps.iter().map(|step| step.loss);
    steps.chain(report.validation_loss).collect()
}

/// One test, as the allocator's account of a rank belongs to the process.
#[test]
fn losses_do_not_depend_on_the_mesh_and_the_report_is_whole() {
    for shape in ["--shape llama", "--shape gpt2"] {
        let one = run(&format!("{shape} --ranks 1 --batch 3"));
        assert!((one.steps[0].loss - 256f64.ln()).abs() < 0.5, "{:?}", one.steps[0]);
        assert!(one.steps[2].loss < one.steps[0].loss);
        for mesh in [
            "--ranks 2 --batch 3",
            "--ring 3 --kv gather --batch 3",
            "--dp 2 --batch 3",
            "--dp 2 --ring 2 --ulysses 2 --kv gather --batch 3",
            "--ring 3 --batch 3",
            "--tp 3 --batch 3",
            "--dp 2 --ring 2 --tp 2 --batch 3",
        ] {
            let other = run(&format!("{shape} {mesh}"));
            for (a, b) in losses(&one).into_iter().zip(losses(&other)) {
                assert!((a - b).abs() <= 1e-4 * a.abs(), "{shape} {mesh}: {a} and {b}");
            }
            let [whole, part] = [&one, &other].map(|report| report.memory.parameter_bytes_per_rank[0]);
            assert_eq!(
                part < whole,
                mesh.contains("--tp"),
                "{shape} {mesh}: {part} of {whole} bytes"
            );
        }
    }
    accumulation_is_a_larger_batch();
    the_report_is_whole();
}

fn accumulation_is_a_larger_batch() {
    // Dropout is drawn per micro-step, so without it.
    let whole = run("--ranks 1 --batch 4 --dropout 0.0");
    let parts = run("--ranks 2 --batch 2 --accumulate 2 --dropout 0.0");
    for (a, b) in losses(&whole).into_iter().zip(losses(&parts)) {
        assert!((a - b).abs() <= 1e-4 * a.abs(), "{a} and {b}");
    }
    assert_eq!(whole.steps[0].tokens, parts.steps[0].tokens);
}

fn the_report_is_whole() {
    let report = run("--ranks 2");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report.json");
    write_json(&report, &file).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap().steps.len(), 3);
    for field in [
        "/program",
        "/version",
        "/mesh/ulysses",
        "/config/seq_len",
        "/steps/2/grad_norm",
        "/validation_loss",
        "/tokens_per_second",
        "/step_seconds_median",
        "/memory/peak_bytes_per_rank/1",
        "/memory/peak_activation_bytes_per_rank/1",
        "/memory/parameter_bytes_per_rank/1",
        "/memory/optimizer_bytes_per_rank/1",
        "/memory/method",
        "/communication/0/bytes_sent",
        "/communication/0/axis",
    ] {
        assert!(json.pointer(field).is_some_and(|value| !value.is_null()), "{field}");
    }
    assert_eq!(
        (json["engine"].as_str(), json["device"].as_str()),
        (Some("threads"), Some("flex"))
    );

    let memory = &report.memory;
    let parameters = memory.parameter_bytes_per_rank[0];
    for rank in 0..2 {
        let activation = memory.peak_activation_bytes_per_rank[rank];
        assert!(activation > 10_000, "rank {rank}: {activation}");
        // Weights, moments and gradients, beside the activations.
        assert!(
            memory.peak_bytes_per_rank[rank] > 4 * parameters,
            "rank {rank}: {memory:?}"
        );
        assert!(memory.bucket_bytes_per_rank[rank] > 0, "rank {rank}: {memory:?}");
    }
    let exchanged = report
        .communication
        .iter()
        .any(|counter| counter.op == "all_to_all" && counter.axis == "ulysses");
    assert!(exchanged, "{:?}", report.communication);
    let summary = summary(&report);
    for words in [
        "peak memory a rank",
        "tokens/s",
        "time in communication",
        "all_to_all",
        "loss, first step",
        "held-out",
    ] {
        assert!(summary.contains(words), "{words}: {summary}");
    }
}
