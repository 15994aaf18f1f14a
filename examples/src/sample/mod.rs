//! Going on from a prompt with a model that was trained or loaded, its cache split over the mesh.

mod flags;
mod run;
mod source;
mod vocabulary;

pub use flags::{SampleConfig, SampleFlags};
pub use run::{SampleReport, sample};
pub use source::Source;
pub use vocabulary::Vocabulary;
