//! The page: one HTML file that needs nothing else, neither script nor network.

use std::fmt::Display;
use std::io;
use std::path::Path;

use serde_json::Value;

use super::charts::{Chart, charts};
use super::table::{HEADER, note};
use super::{Measurement, Row};
use crate::RunError;

/// Writes the page with table and charts.
///
/// # Errors
/// If the file cannot be written.
pub fn write_page(measurement: &Measurement, file: &Path) -> Result<(), RunError> {
    let failed = RunError::output("--page", file);
    let charts = charts(measurement).map_err(|error| failed(io::Error::other(error.to_string())))?;
    std::fs::write(file, page(measurement, &charts)).map_err(failed)
}

fn page(measurement: &Measurement, charts: &[Chart]) -> String {
    let config = &measurement.config;
    let of = |field: &str| escape(plain(&config[field]));
    let charts: String = charts.iter().map(figure).collect();
    format!(
        "<!DOCTYPE html>\n\
         <html lang=\"en\">\n\
         <head>\n\
         <meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Sequence parallelism off and on</title>\n\
         <style>\n{style}</style>\n\
         </head>\n\
         <body>\n<main>\n\
         <header>\n\
         <h1>Sequence parallelism off and on</h1>\n\
         <p>The same training on several meshes of ranks: a {shape} transformer of width {hidden} with {layers} layers and \
         {heads} heads, a batch of {batch}, {steps} steps of AdamW in f32. Weights, data and seed are the same in \
         all runs.</p>\n\
         {cards}\
         </header>\n\
         <section class=\"charts\">\n{charts}</section>\n\
         <section>\n<h2>All runs</h2>\n{table}<p>{note}.</p>\n</section>\n\
         <section>\n<h2>Configuration</h2>\n{configuration}</section>\n\
         <footer>{program} {version}. Ranks are {engine} on {device}, with {cores} cores for all of them; more ranks than \
         cores, or than devices, save memory but not time. Memory: {method}.</footer>\n\
         </main>\n</body>\n</html>\n",
        style = include_str!("page.css"),
        shape = of("shape"),
        hidden = of("hidden"),
        layers = of("layers"),
        heads = of("heads"),
        batch = of("batch"),
        steps = of("steps"),
        cards = cards(measurement),
        table = table(measurement),
        note = escape(note(measurement)),
        configuration = configuration(config),
        program = escape(&measurement.program),
        version = escape(&measurement.version),
        engine = of("engine"),
        device = of("device"),
        cores = measurement.cores,
        method = escape(measurement.runs.last().map_or("", |run| &run.memory.method)),
    )
}

/// What each mesh does for the longest sequence, beside the reference.
fn cards(measurement: &Measurement) -> String {
    let rows = measurement.by_length().last().unwrap_or_default();
    let reference = measurement.reference();
    let Some(of) = rows.iter().find(|row| row.mesh == reference).filter(|_| rows.len() > 1) else {
        return String::new();
    };
    let mut html = format!(
        "<p>With {} tokens, beside &quot;{}&quot;:</p>\n<div class=\"cards\">\n",
        escape(&of.cells()[0]),
        escape(reference.label())
    );
    for row in rows.iter().filter(|row| row.mesh != reference) {
        let figure = |value: f64, of: f64, name: &str| match of {
            0.0 => String::new(),
            of => format!("<div><b>{:.2} ×</b> {name}</div>", value / of),
        };
        html += &format!(
            "<div class=\"card\"><span>{}</span>{}{}<span>losses differ by {}</span></div>\n",
            escape(row.mesh.label()),
            figure(row.peak_bytes as f64, of.peak_bytes as f64, "the memory of a rank"),
            figure(row.tokens_per_second, of.tokens_per_second, "the tokens/s"),
            escape(&row.cells()[8]),
        );
    }
    html + "</div>\n"
}

fn figure(chart: &Chart) -> String {
    let Chart {
        title,
        note,
        wide,
        legend,
        svg,
    } = chart;
    let (title, note) = (escape(title), escape(note));
    let mut names = String::new();
    for (color, name) in legend {
        names += &format!("<li><i style=\"background:{color}\"></i>{}</li>", escape(name));
    }
    let class = if *wide { " class=\"wide\"" } else { "" };
    let svg = svg.replacen(
        "<svg ",
        &format!("<svg role=\"img\" aria-label=\"{title}. {note}\" "),
        1,
    );
    format!(
        "<figure{class}>\n<figcaption><h2>{title}</h2>{note}<ul class=\"legend\">{names}</ul></figcaption>\n\
         <div class=\"scroll\">{svg}</div>\n</figure>\n"
    )
}

fn table(measurement: &Measurement) -> String {
    let mut html = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
    for name in HEADER {
        html += &format!("<th scope=\"col\">{}</th>", escape(name));
    }
    html += "</tr></thead>\n";
    for rows in measurement.by_length() {
        html += "<tbody>\n";
        rows.iter().for_each(|row| html += &table_row(row));
        html += "</tbody>\n";
    }
    html + "</table></div>\n"
}

fn table_row(row: &Row) -> String {
    let mut html = String::from("<tr>");
    for cell in row.cells() {
        html += &format!("<td>{}</td>", escape(cell));
    }
    html + "</tr>\n"
}

/// Every field, under its name.
fn configuration(config: &Value) -> String {
    let mut html = String::from("<dl>\n");
    for (name, value) in config.as_object().into_iter().flatten() {
        html += &format!(
            "<div><dt>{}</dt><dd>{}</dd></div>\n",
            escape(name),
            escape(plain(value))
        );
    }
    html + "</dl>\n"
}

/// A value without JSON's quotes and brackets.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "default".into(),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// Text as HTML, in an attribute too.
fn escape(text: impl Display) -> String {
    let mut html = String::new();
    for character in text.to_string().chars() {
        match character {
            '&' => html += "&amp;",
            '<' => html += "&lt;",
            '>' => html += "&gt;",
            '"' => html += "&quot;",
            '\'' => html += "&#39;",
            other => html.push(other),
        }
    }
    html
}
