//! What a program tells while it runs: complaints on stderr, with `--trace` a timeline of all ranks, and, if built with
//! the feature `nvtx`, the same spans as ranges for NVIDIA's profilers.

#[cfg(feature = "nvtx")]
mod ranges;
mod slice;
mod timeline;

use std::path::Path;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::{Layer, Registry, prelude::*};

use crate::{InputError, RunError};
use timeline::Timeline;

type Listener = Box<dyn Layer<Registry> + Send + Sync>;

/// Runs a program's work. Its spans go to `file`, if there is one, which is whole also if the work fails. To be called once
/// in a process: it sets who listens to `tracing`.
///
/// # Errors
/// Bad input if the file cannot be made, before the work begins; then those of the work; then those of writing the file.
pub fn traced<T>(file: Option<&Path>, work: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
    let mut listeners = vec![complaints()];
    #[cfg(feature = "nvtx")]
    listeners.push(ranges::Ranges.with_filter(spans()).boxed());
    let Some(file) = file else {
        tracing_subscriber::registry().with(listeners).init();
        return work();
    };
    let timeline =
        Timeline::create(file).map_err(|error| InputError(format!("--trace {}: {error}", file.display())))?;
    listeners.push(timeline.clone().with_filter(spans()).boxed());
    tracing_subscriber::registry().with(listeners).init();

    let done = work();
    let written = timeline.close().map_err(RunError::output("--trace", file));
    let done = done?;
    written?;
    eprintln!("trace: {}", file.display());
    Ok(done)
}

fn complaints() -> Listener {
    // A driver's loader complains of what is missing, and then the program does, in one line.
    let levels = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("wgpu_hal", LevelFilter::OFF);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    lines.with_filter(levels).boxed()
}

/// Those of this workspace's crates, whose names all begin so.
fn spans() -> Targets {
    Targets::new().with_target("burn_sp", LevelFilter::TRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is kept for spans that nobody asked for: the level alone turns them off.
    #[test]
    fn without_a_timeline_spans_are_off() {
        assert_eq!(complaints().max_level_hint(), Some(LevelFilter::WARN));
    }
}
