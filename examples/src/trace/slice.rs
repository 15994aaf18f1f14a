use std::fmt::Debug;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, SpanRef};

/// A span as a profiler shows it; kept with the span while it lives.
#[derive(Debug)]
pub struct Slice {
    /// The span's name and, if it has a field `number`, that: `"block 3"`.
    pub name: String,
    /// Its other fields.
    pub fields: Map<String, Value>,
}

impl Slice {
    /// Keeps a new span's slice.
    pub fn keep<S>(attributes: &Attributes<'_>, id: &Id, context: &Context<'_, S>)
    where
        S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    {
        let mut fields = Fields(Map::new());
        attributes.record(&mut fields);
        let Fields(mut fields) = fields;
        let name = attributes.metadata().name();
        let name = match fields.remove("number") {
            Some(number) => format!("{name} {number}"),
            None => name.into(),
        };
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(Slice { name, fields });
        }
    }

    /// Shows the slice of a span that [`keep`](Self::keep) has seen.
    pub fn show<S: for<'a> LookupSpan<'a>>(span: Option<SpanRef<'_, S>>, show: impl FnOnce(&Slice)) {
        if let Some(span) = span
            && let Some(slice) = span.extensions().get::<Slice>()
        {
            show(slice);
        }
    }
}

struct Fields(Map<String, Value>);

impl Fields {
    fn set(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().into(), value.into());
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.set(field, format!("{value:?}"));
    }
}
