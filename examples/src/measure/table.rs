//! The table on the terminal, whose cells the page has too.

use comfy_table::CellAlignment;
use indicatif::{HumanBytes, HumanCount};

use super::{Measurement, Row};
use crate::summary;

/// What the cells of a row are.
pub(crate) const HEADER: [&str; 9] = [
    "tokens",
    "mesh",
    "peak memory a rank",
    "of it activations",
    "tokens/s",
    "seconds a step",
    "in communication",
    "last loss",
    "loss differs by",
];

/// All runs, for the terminal.
pub fn table(measurement: &Measurement) -> String {
    let mut table = summary::table(HEADER);
    for row in &measurement.summary {
        table.add_row(row.cells());
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_cell_alignment(match index {
            1 => CellAlignment::Left,
            _ => CellAlignment::Right,
        });
    }
    format!("{table}\n{}", note(measurement))
}

/// What the last column says.
pub(crate) fn note(measurement: &Measurement) -> String {
    format!(
        "loss differs by: the largest difference of any loss, of a step or of held-out text, from that of \"{}\" at the \
         same length, relative to it",
        measurement.reference().label()
    )
}

impl Row {
    /// The cells, for persons.
    pub(crate) fn cells(&self) -> [String; HEADER.len()] {
        let bytes = |bytes: u64| match bytes {
            0 => "not measured".into(),
            bytes => HumanBytes(bytes).to_string(),
        };
        [
            HumanCount(self.seq_len as u64).to_string(),
            self.mesh.label(),
            bytes(self.peak_bytes),
            bytes(self.activation_bytes),
            HumanCount(self.tokens_per_second.round() as u64).to_string(),
            format!("{:.3}", self.step_seconds_median),
            format!("{:.1} %", 100.0 * self.communication_share),
            format!("{:.4}", self.last_loss),
            match self.loss_difference {
                None => "-".into(),
                Some(0.0) => "0".into(),
                Some(difference) => format!("{difference:.0e}"),
            },
        ]
    }
}
