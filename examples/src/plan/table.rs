//! The plan for a person.

use std::collections::HashSet;

use burn_sp::layout::Axis;
use comfy_table::Table;
use indicatif::{HumanBytes, HumanCount};

use super::Way;
use crate::flags::{Recompute, Shard, name};
use crate::summary::table;

/// Every way, or the first of each mesh: the best, by the order of [`ways`](super::ways).
pub fn plan_table(ways: &[Way], all: bool) -> Table {
    let mut table = table([
        "mesh",
        "recompute",
        "shared",
        "tiles",
        "memory",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "buffers",
        "sent a step",
        "seconds",
        "longest",
        "fits",
    ]);
    let mut seen = HashSet::new();
    for way in ways {
        if !all && !seen.insert(way.mesh().to_string()) {
            continue;
        }
        let bytes = |bytes: u64| HumanBytes(bytes).to_string();
        let memory = &way.memory;
        table.add_row([
            way.mesh().to_string(),
            name(way.config.learning.recompute),
            name(way.config.learning.shard),
            way.config.learning.mlp_tiles.to_string(),
            bytes(memory.total()),
            bytes(memory.parameters),
            bytes(memory.gradients),
            bytes(memory.optimizer),
            bytes(memory.activations),
            bytes(memory.logits),
            bytes(memory.buffers),
            bytes(way.bytes_sent),
            format!("{:.3}", way.seconds),
            way.longest
                .map_or("-".into(), |longest| HumanCount(longest as u64).to_string()),
            if way.fits { "yes" } else { "no" }.into(),
        ]);
    }
    table
}

/// Which to choose, and why; some lines.
pub fn recommendation(ways: &[Way], budget: Option<u64>) -> String {
    let Some(best) = ways.first() else {
        return "nothing to choose from".into();
    };
    let limit = budget.map(|budget| HumanBytes(budget).to_string());
    let length = HumanCount(best.config.run.seq_len as u64);
    if !best.fits {
        let longest = HumanCount(best.longest.unwrap_or(0) as u64);
        return format!(
            "Nothing fits {length} tokens into {}. The nearest is {}, which takes {longest} tokens: use more ranks, more \
             memory, or a shorter sequence.",
            limit.unwrap_or_default(),
            flags(best)
        );
    }
    let fitting = ways.iter().filter(|way| way.fits).count();
    let of = match &limit {
        Some(limit) => format!("the fastest of {fitting} ways that fit {length} tokens into {limit} a rank"),
        None => format!("the fastest of {fitting} ways"),
    };
    let mut reason = format!("Use {}: {of}", flags(best));
    // What the memory saved elsewhere costs.
    if let Some(quicker) = ways
        .iter()
        .filter(|way| !way.fits)
        .min_by(|a, b| a.seconds.total_cmp(&b.seconds))
        && quicker.seconds < best.seconds
    {
        reason += &format!(
            "; {} would take {:.0} % less time, and {}",
            flags(quicker),
            100.0 * (1.0 - quicker.seconds / best.seconds),
            HumanBytes(quicker.memory.total())
        );
    }
    if let Some(longest) = ways.iter().filter(|way| way.fits).max_by_key(|way| way.longest)
        && longest.longest > best.longest
    {
        reason += &format!(
            ". For the longest sequence, {} tokens: {}",
            HumanCount(longest.longest.unwrap_or(0) as u64),
            flags(longest)
        );
    }
    reason + "."
}

/// As the training program takes them.
fn flags(way: &Way) -> String {
    let mesh = way.mesh();
    let mut flags: Vec<String> = Axis::ALL
        .iter()
        .filter(|axis| mesh.size(**axis) > 1)
        .map(|axis| format!("--{axis} {}", mesh.size(*axis)))
        .collect();
    if flags.is_empty() {
        flags.push("--ranks 1".into());
    }
    if way.config.learning.recompute != Recompute::None || way.config.learning.shard == Shard::Parameters {
        flags.push(format!("--recompute {}", name(way.config.learning.recompute)));
    }
    if way.config.learning.shard != Shard::None {
        flags.push(format!("--shard {}", name(way.config.learning.shard)));
    }
    if way.config.learning.mlp_tiles > 1 {
        flags.push(format!("--mlp-tiles {}", way.config.learning.mlp_tiles));
    }
    flags.join(" ")
}
