//! What the charts show.

use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, RGBColor};

use super::plot::{Axes, Drawn, INK, WIDTH, css, figure, panels, plot, text};
use super::{Measurement, Row};
use crate::report::Memory;

/// Of meshes. All colours here are told apart by eyes that see few, and stand out from white and from black.
const MESHES: [RGBColor; 8] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x8C, 0x56, 0x4B),
    RGBColor(0x7F, 0x7F, 0x7F),
];

type Kind = (&'static str, RGBColor, fn(&Memory) -> &Vec<u64>);

/// What a rank's memory holds, from the bottom of a bar to its top.
const KINDS: [Kind; 4] = [
    ("parameters", RGBColor(0x44, 0x77, 0xAA), |memory| {
        &memory.parameter_bytes_per_rank
    }),
    ("optimizer", RGBColor(0x66, 0xCC, 0xEE), |memory| {
        &memory.optimizer_bytes_per_rank
    }),
    ("gradients", RGBColor(0xCC, 0xBB, 0x44), |memory| {
        &memory.gradient_bytes_per_rank
    }),
    ("activations", RGBColor(0xEE, 0x66, 0x77), |memory| {
        &memory.peak_activation_bytes_per_rank
    }),
];

/// A chart and what is said beside it.
pub(super) struct Chart {
    pub title: &'static str,
    pub note: &'static str,
    /// Whether it takes the width of the page.
    pub wide: bool,
    /// Colour, as CSS has it, and name.
    pub legend: Vec<(String, String)>,
    pub svg: String,
}

/// All charts.
pub(super) fn charts(measurement: &Measurement) -> Drawn<Vec<Chart>> {
    let meshes = measurement.meshes().into_iter().enumerate();
    let meshes: Vec<_> = meshes.map(|(index, mesh)| (css(color(index)), mesh.label())).collect();
    let kinds = KINDS.iter().map(|(name, color, _)| (css(*color), name.to_string()));
    Ok(vec![
        Chart {
            title: "Memory of a rank",
            note: "By kind, of the rank with most of it. The mark is the measured peak: it is lower than the sum of the \
                   kinds where gradients come only as activations go, and higher by what is of no kind, such as the \
                   buffers in which gradients are summed.",
            wide: true,
            legend: kinds.chain([(css(INK), "measured peak, the number".into())]).collect(),
            svg: memory(measurement)?,
        },
        Chart {
            title: "Speed",
            note: "Tokens of a step, over all ranks, by the median time of a step.",
            wide: false,
            legend: meshes.clone(),
            svg: over_lengths(measurement, "tokens/s", 0.0, |row| row.tokens_per_second)?,
        },
        Chart {
            title: "Time in communication",
            note: "The share of the ranks' time in collectives, waiting included.",
            wide: false,
            legend: meshes.clone(),
            svg: over_lengths(measurement, "% of the time", 1.0, |row| 100.0 * row.communication_share)?,
        },
        Chart {
            title: "Loss",
            note: "Where losses are the same, as they should be, lines lie upon each other; at the marked steps each mesh \
                   has a ring, the first the widest.",
            wide: true,
            legend: meshes,
            svg: loss(measurement)?,
        },
    ])
}

fn color(mesh: usize) -> RGBColor {
    MESHES[mesh % MESHES.len()]
}

/// A panel for every mesh, with a bar for every length.
fn memory(measurement: &Measurement) -> Drawn<String> {
    let most = |ranks: &Vec<u64>| ranks.iter().copied().max().unwrap_or_default() as f64;
    let (meshes, lengths) = (measurement.meshes(), measurement.by_length().count());
    let stacks: Vec<_> = measurement
        .runs
        .iter()
        .map(|run| KINDS.map(|(_, _, bytes)| most(bytes(&run.memory))))
        .collect();
    let peaks = measurement.summary.iter().map(|row| row.peak_bytes as f64);
    let highest = stacks
        .iter()
        .map(|stack| stack.iter().sum())
        .chain(peaks)
        .fold(1.0, f64::max);
    let (unit, name) = unit(highest);

    // A bar wants so many pixels, and the axis its own.
    let in_row = (WIDTH / (70 + 56 * lengths)).clamp(1, 4);
    panels(meshes.len(), in_row, |mesh, area| {
        let ticks = measurement.by_length().enumerate();
        let axes = Axes {
            title: &meshes[mesh].label(),
            x: -0.5..lengths as f64 - 0.5,
            x_name: "sequence length (tokens)",
            x_ticks: ticks
                .map(|(index, rows)| (index as f64, figure(rows[0].seq_len as f64)))
                .collect(),
            y: 0.0..1.12 * highest / unit,
            y_name: &format!("memory ({name})"),
        };
        let mut plot = plot(area, &axes)?;
        for (index, rows) in measurement.by_length().enumerate() {
            let (left, right) = (index as f64 - 0.34, index as f64 + 0.34);
            let mut top = 0.0;
            for (bytes, (_, color, _)) in stacks[index * meshes.len() + mesh].iter().zip(KINDS) {
                let bottom = top;
                top += bytes / unit;
                plot.draw_series([Rectangle::new([(left, bottom), (right, top)], color.filled())])?;
            }
            let peak = rows[mesh].peak_bytes as f64 / unit;
            if peak > 0.0 {
                plot.draw_series([PathElement::new([(left, peak), (right, peak)], INK.stroke_width(2))])?;
                let above = text(12.0).pos(Pos::new(HPos::Center, VPos::Bottom));
                let at = (index as f64, top.max(peak));
                plot.draw_series([Text::new(figure((10.0 * peak).round() / 10.0), at, above)])?;
            }
        }
        Ok(())
    })
}

/// The largest unit of which there is at least one.
fn unit(bytes: f64) -> (f64, &'static str) {
    [(30, "GiB"), (20, "MiB"), (10, "KiB")]
        .map(|(power, name)| ((1u64 << power) as f64, name))
        .into_iter()
        .find(|(unit, _)| bytes >= *unit)
        .unwrap_or((1.0, "bytes"))
}

/// A figure of every row against the sequence length (doubling it is the same way everywhere), with a line a mesh. The
/// vertical axis ends no lower than `least`.
fn over_lengths(measurement: &Measurement, name: &str, least: f64, value: fn(&Row) -> f64) -> Drawn<String> {
    let at = |row: &Row| (row.seq_len as f64).log2();
    let ticks = measurement
        .by_length()
        .map(|rows| (at(&rows[0]), figure(rows[0].seq_len as f64)));
    let ticks: Vec<_> = ticks.collect();
    let (first, last) = (ticks[0].0, ticks[ticks.len() - 1].0);
    let margin = (0.1 * (last - first)).max(0.1);
    let highest = measurement.summary.iter().map(value).fold(least, f64::max);
    panels(1, 1, |_, area| {
        let axes = Axes {
            title: "",
            x: first - margin..last + margin,
            x_name: "sequence length (tokens)",
            x_ticks: ticks.clone(),
            y: 0.0..1.1 * highest,
            y_name: name,
        };
        let mut plot = plot(area, &axes)?;
        for mesh in 0..measurement.meshes().len() {
            let points = measurement
                .by_length()
                .map(|rows| (at(&rows[mesh]), value(&rows[mesh])));
            let line = LineSeries::new(points, color(mesh).filled().stroke_width(2));
            plot.draw_series(line.point_size(4))?;
        }
        Ok(())
    })
}

/// A panel for every length, with a line for every mesh.
fn loss(measurement: &Measurement) -> Drawn<String> {
    let meshes = measurement.meshes().len();
    let lengths: Vec<_> = measurement.by_length().map(|rows| rows[0].seq_len).collect();
    let losses = || measurement.runs.iter().flat_map(|run| &run.steps).map(|step| step.loss);
    let (low, high) = losses().fold((f64::MAX, 0.0), |(low, high), loss| (loss.min(low), loss.max(high)));
    let margin = (0.08 * (high - low)).max(0.01);
    // Of so many pixels, in which the next ring lies.
    let ring = (12 / meshes).clamp(1, 3);
    let steps = measurement.runs[0].steps.len();
    panels(lengths.len(), 3, |length, area| {
        let ticks = (1..=steps).filter(|step| step.is_multiple_of(steps.div_ceil(6)));
        let axes = Axes {
            title: &format!("{} tokens", figure(lengths[length] as f64)),
            x: 0.5..steps as f64 + 0.5,
            x_name: "step",
            x_ticks: ticks.map(|step| (step as f64, figure(step as f64))).collect(),
            y: (low - margin).max(0.0)..high + margin,
            y_name: "loss (nats a token)",
        };
        let mut plot = plot(area, &axes)?;
        for (mesh, run) in measurement.runs[length * meshes..][..meshes].iter().enumerate() {
            let points = run.steps.iter().map(|step| (step.step as f64, step.loss));
            plot.draw_series(LineSeries::new(points.clone(), color(mesh).stroke_width(2)))?;
            let radius = 3 + ring * (meshes - 1 - mesh);
            let marked = points.filter(|(at, _)| axes.x_ticks.iter().any(|(tick, _)| tick == at));
            plot.draw_series(marked.map(|point| Circle::new(point, radius as u32, color(mesh).filled())))?;
        }
        Ok(())
    })
}
