//! The same seed and mesh: the same bits, whether ranks are threads or processes.

use std::path::Path;

use burn_sp_examples::report::Report;

use crate::run::losses;
use crate::{Run, TINY, as_threads, folder, text};

fn as_processes(line: &str, ranks: usize, report: &Path) {
    let line = format!("{line} --timeout 60 --report {}", report.display());
    let mut run = Run::start(&folder("losses"), ranks, &line);
    run.succeeds();
}

#[test]
fn twenty_steps_have_the_same_bits() {
    for mesh in [
        "--ulysses 4",
        "--ring 2 --ulysses 2 --accumulate 2",
        "--ring 4 --kv gather",
        "--dp 2 --tp 2",
        "--dp 2 --ulysses 2 --shard parameters",
        "--ulysses 4 --shard optimizer",
    ] {
        let reports = folder("reports");
        let line = format!("{TINY} --steps 20 --batch 2 --text {} {mesh}", text(&reports).display());
        let files = [reports.join("threads.json"), reports.join("processes.json")];
        as_threads(&line, &files[0]);
        as_processes(&line, 4, &files[1]);
        let [threads, processes] = files.map(|file| std::fs::read_to_string(file).unwrap());
        assert_eq!(losses(&threads).len(), 41);
        assert_eq!(losses(&threads), losses(&processes), "{mesh}");
        let [threads, processes]: [Report; 2] = [threads, processes].map(|text| serde_json::from_str(&text).unwrap());
        // What every rank sent is what the formulas say, whatever the engine.
        let sent = |report: &Report| -> Vec<_> {
            let of = |c: &burn_sp::comm::Counter| (c.rank, c.op.clone(), c.axis.clone(), c.calls, c.bytes_sent);
            report.communication.iter().map(of).collect()
        };
        assert_eq!(sent(&threads), sent(&processes), "{mesh}");
        // Every process has its own.
        assert_eq!(processes.memory.resident_peak_bytes_per_process.len(), 4);
        assert_eq!(threads.memory.resident_peak_bytes_per_process.len(), 1);
    }
}
