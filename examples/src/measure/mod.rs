//! One training, measured with sequence parallelism off and on: a run for every sequence length and mesh, a table, JSON,
//! and a page with charts that needs no network.

mod charts;
mod flags;
mod page;
mod plot;
mod run;
mod table;

pub use flags::{MeasureConfig, MeasureFlags, MeshFlag};
pub use page::write_page;
pub use run::{Measurement, Row, measure};
pub use table::table;
