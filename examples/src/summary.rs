//! The tables that a program ends with.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{HumanBytes, HumanCount};

use crate::report::Report;

/// What a person wants to know of a run.
pub fn summary(report: &Report) -> String {
    let mut table = table(["", "result"]);
    let bytes = |ranks: &[u64]| match (ranks.iter().min(), ranks.iter().max()) {
        (Some(low), Some(high)) if low == high => HumanBytes(*high).to_string(),
        (Some(low), Some(high)) => format!("{} to {}", HumanBytes(*low), HumanBytes(*high)),
        _ => "-".into(),
    };
    let measured = |ranks: &[u64]| match ranks.iter().all(|bytes| *bytes == 0) {
        true => "not measured".into(),
        false => bytes(ranks),
    };
    let memory = &report.memory;
    table.add_row(["peak memory a rank".into(), measured(&memory.peak_bytes_per_rank)]);
    table.add_row([
        "  of it activations, at most".into(),
        measured(&memory.peak_activation_bytes_per_rank),
    ]);
    table.add_row(["  parameters".into(), bytes(&memory.parameter_bytes_per_rank)]);
    table.add_row(["  optimizer".into(), bytes(&memory.optimizer_bytes_per_rank)]);
    table.add_row(["  gradients".into(), bytes(&memory.gradient_bytes_per_rank)]);
    if memory.resident_peak_bytes_per_process.iter().any(|bytes| *bytes > 0) {
        table.add_row([
            "resident, at most a process".into(),
            bytes(&memory.resident_peak_bytes_per_process),
        ]);
    }
    table.add_row([
        "tokens/s".to_string(),
        HumanCount(report.tokens_per_second.round() as u64).to_string(),
    ]);
    table.add_row([
        "seconds a step (median)".to_string(),
        format!("{:.3}", report.step_seconds_median),
    ]);
    table.add_row([
        "time in communication".to_string(),
        format!("{:.1} %", 100.0 * report.communication_share()),
    ]);
    if let (Some(first), Some(last)) = (report.steps.first(), report.steps.last()) {
        table.add_row(["loss, first step".to_string(), format!("{:.4}", first.loss)]);
        table.add_row([format!("loss, step {}", last.step), format!("{:.4}", last.loss)]);
    }
    if let Some(loss) = report.validation_loss {
        table.add_row(["loss on held-out text".to_string(), format!("{loss:.4}")]);
    }
    match traffic(report) {
        Some(traffic) => format!("{table}\n{traffic}"),
        None => table.to_string(),
    }
}

/// Bytes by collective and axis; none if no rank sent any.
fn traffic(report: &Report) -> Option<Table> {
    #[derive(Default)]
    struct Sum {
        calls: u64,
        bytes: u64,
        seconds: f64,
    }
    let mut sums: BTreeMap<(&str, &str), Sum> = BTreeMap::new();
    for counter in &report.communication {
        let sum = sums.entry((&counter.op, &counter.axis)).or_default();
        sum.calls += counter.calls;
        sum.bytes += counter.bytes_sent;
        sum.seconds += counter.seconds;
    }
    sums.retain(|_, sum| sum.bytes > 0);
    if sums.is_empty() {
        return None;
    }
    let ranks = report.ranks as u64;
    let steps = report.steps.len().max(1) as u64;
    let mut table = table(["collective", "over", "calls a step", "sent a step", "ms a step"]);
    for ((op, axis), sum) in sums {
        table.add_row([
            op.to_string(),
            axis.to_string(),
            format!("{}", (sum.calls as f64 / (ranks * steps) as f64 * 10.0).round() / 10.0),
            HumanBytes(sum.bytes / (ranks * steps)).to_string(),
            format!("{:.1}", 1e3 * sum.seconds / (ranks * steps) as f64),
        ]);
    }
    Some(table)
}

/// An empty table: text to the left in the first column, figures to the right in the others.
pub(crate) fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
