//! Data for sequence-parallel language models: which samples a step has and which of them a replica reads, documents packed
//! into sequences, and tokens in files that may be larger than memory.
//!
//! All of it is a function of seed and step number, so a run that is resumed, on any mesh, reads what it would have read.
//!
//! ```
//! use burn::tensor::Device;
//! use burn_sp::data::{Sampler, TokenBatch, TokenFile, TokenSequences, TokenWriter};
//! use burn_sp::prelude::*;
//!
//! let file = std::env::temp_dir().join(format!("tokens-{}", std::process::id()));
//! let mut writer = TokenWriter::create(&file, 100, "where they are from")?;
//! for document in [&[1, 2, 3][..], &[4, 5, 6, 7, 8]] {
//!     writer.write(document)?;
//!     writer.end_document()?;
//! }
//! writer.finish()?;
//!
//! let sequences = TokenSequences::new(TokenFile::open(&file)?, 4).with_boundaries();
//! let sampler = Sampler::new(sequences.count(), 2, 7);
//! let labels = launch(&LaunchConfig::new(MeshShape::ulysses(2)), &Device::flex(), |device: SpDevice| {
//!     let own = sampler.own(0, device.mesh());
//!     let own: Vec<_> = own.into_iter().map(|sample| sequences.get(sample).unwrap()).collect();
//!     let batch = TokenBatch::packed(&own, &device);
//!     // Model and loss take `batch.tokens`, `batch.labels` and, for attention, `batch.mask`.
//!     valid_tokens([&batch.labels])
//! });
//! // Of 8 tokens the last of each document has no label.
//! assert_eq!(labels.unwrap(), [6, 6]);
//! # std::fs::remove_file(&file).unwrap();
//! # Ok::<(), burn_sp::data::TokenError>(())
//! ```

mod batch;
mod error;
mod file;
mod packing;
mod permutation;
mod sampler;
mod sequences;
#[cfg(test)]
mod tests;
mod writer;

pub use batch::TokenBatch;
pub use error::TokenError;
pub use file::TokenFile;
pub use packing::{IGNORED, PackedSequence, pack};
pub use permutation::Permutation;
pub use sampler::Sampler;
pub use sequences::TokenSequences;
pub use writer::TokenWriter;
