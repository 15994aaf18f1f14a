//! Spans as NVTX ranges, which NVIDIA's profilers show beside the work of a GPU. They cost next to nothing where no
//! profiler has been attached.

use tracing::Subscriber;
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::slice::Slice;

/// Pushes a range where a thread enters a span, and pops it where the thread leaves.
pub struct Ranges;

impl<S> Layer<S> for Ranges
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        Slice::keep(attributes, id, &context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        Slice::show(context.span(id), |slice| {
            nvtx::range_push!("{}", slice.name);
        });
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        Slice::show(context.span(id), |_| {
            nvtx::range_pop!();
        });
    }
}
