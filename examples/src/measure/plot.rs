//! How charts are drawn: panels with axes, as SVG in the colours of the page around it.

use std::io;
use std::ops::Range;

use indicatif::HumanCount;
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea};
use plotters::prelude::SVGBackend;
use plotters::style::{Color, IntoFont, RGBColor, TextStyle};

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Plot<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Labelled, RangedCoordf64>>;
pub(super) type Drawn<T> = Result<T, DrawingAreaErrorKind<io::Error>>;

/// Text and axes: what the page writes in.
pub(super) const INK: RGBColor = RGBColor(0, 0, 0);

/// On white and on black.
const GRID: RGBColor = RGBColor(128, 128, 128);

/// Of a row of panels, in pixels; of one panel, at most half of it.
pub(super) const WIDTH: usize = 960;
const HEIGHT: usize = 300;

/// What a plot is drawn upon.
pub(super) struct Axes<'a> {
    pub title: &'a str,
    pub x: Range<f64>,
    pub x_name: &'a str,
    /// Where the horizontal axis has labels, and which.
    pub x_ticks: Vec<(f64, String)>,
    pub y: Range<f64>,
    pub y_name: &'a str,
}

/// How CSS names a colour.
pub(super) fn css(color: RGBColor) -> String {
    match color {
        INK => "currentColor".into(),
        RGBColor(r, g, b) => format!("#{r:02X}{g:02X}{b:02X}"),
    }
}

/// Draws panels in rows, so many in each at most.
pub(super) fn panels(count: usize, in_row: usize, draw: impl Fn(usize, &Area) -> Drawn<()>) -> Drawn<String> {
    let rows = count.div_ceil(in_row);
    let columns = count.div_ceil(rows);
    let width = columns * (WIDTH / columns).min(WIDTH / 2);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (width as u32, (rows * HEIGHT) as u32)).into_drawing_area();
        let areas = root.split_evenly((rows, columns));
        for (index, area) in areas.iter().take(count).enumerate() {
            draw(index, area)?;
        }
        root.present()?;
    }
    Ok(svg.replace("#000000", &css(INK)))
}

/// Text of so many pixels.
pub(super) fn text(pixels: f64) -> TextStyle<'static> {
    // The backend divides by this.
    ("sans-serif", pixels * 1.24).into_font().color(&INK)
}

/// Draws axes, for a plot upon them.
pub(super) fn plot<'a, 'b>(area: &'a Area<'b>, axes: &Axes) -> Drawn<Plot<'a, 'b>> {
    let x = Labelled {
        coordinate: axes.x.clone().into(),
        ticks: axes.x_ticks.clone(),
    };
    let mut builder = ChartBuilder::on(area);
    builder.margin(8).x_label_area_size(44).y_label_area_size(66);
    if !axes.title.is_empty() {
        builder.caption(axes.title, text(14.0));
    }
    let mut plot = builder.build_cartesian_2d(x, axes.y.clone())?;
    plot.configure_mesh()
        .disable_x_mesh()
        .max_light_lines(0)
        .bold_line_style(GRID.mix(0.3))
        .axis_style(GRID)
        .label_style(text(12.0))
        .axis_desc_style(text(12.0))
        .x_desc(axes.x_name)
        .y_desc(axes.y_name)
        .y_labels(7)
        .y_label_formatter(&|y| figure(*y))
        .draw()?;
    Ok(plot)
}

/// A horizontal axis with labels of its own.
pub(super) struct Labelled {
    coordinate: RangedCoordf64,
    ticks: Vec<(f64, String)>,
}

impl Ranged for Labelled {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.coordinate.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|(at, _)| *at).collect()
    }

    fn range(&self) -> Range<f64> {
        self.coordinate.range()
    }
}

impl ValueFormatter<f64> for Labelled {
    fn format_ext(&self, value: &f64) -> String {
        let tick = self.ticks.iter().find(|(at, _)| at == value);
        tick.map_or_else(String::new, |(_, label)| label.clone())
    }
}

/// A figure at an axis or a bar, which is not below 0.
pub(super) fn figure(value: f64) -> String {
    if value >= 100.0 || value.fract() == 0.0 {
        return HumanCount(value.round() as u64).to_string();
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').into()
}
