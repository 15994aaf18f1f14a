//! Spans as a file of trace events, after Google's "Trace Event Format" (2016): a JSON array, the beginning and the end of
//! every span in it an event.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;
use serde_json::{Map, Value, json};
use tracing::Subscriber;
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::slice::Slice;

/// The one process.
const PROCESS: usize = 1;

/// Writes the spans of ranks, a track each in their order; those of other threads are left out.
#[derive(Clone, Debug)]
pub struct Timeline {
    start: Instant,
    output: Arc<Mutex<Output>>,
}

#[derive(Debug)]
enum Output {
    Open(Tracks),
    /// Writing failed; nothing more has been written.
    Failed(io::Error),
    Closed,
}

#[derive(Debug)]
struct Tracks {
    file: BufWriter<File>,
    /// The ranks whose tracks have a name.
    named: BTreeSet<usize>,
}

#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    /// `"B"` where a span begins, `"E"` where it ends.
    ph: &'static str,
    /// Microseconds.
    ts: f64,
    pid: usize,
    tid: usize,
    /// Of the beginning; the end need not repeat them.
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<&'a Map<String, Value>>,
}

impl Timeline {
    /// An empty timeline.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn create(file: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(file)?);
        write!(file, "[\n{}", naming("process_name", track(0), "burn-sp"))?;
        let tracks = Tracks {
            file,
            named: BTreeSet::new(),
        };
        Ok(Self {
            start: Instant::now(),
            output: Arc::new(Mutex::new(Output::Open(tracks))),
        })
    }

    /// Ends the file; spans that end later are left out.
    ///
    /// # Errors
    /// The first one of writing it.
    pub fn close(&self) -> io::Result<()> {
        match std::mem::replace(&mut *self.output(), Output::Closed) {
            Output::Open(tracks) => tracks.end(),
            Output::Failed(error) => Err(error),
            Output::Closed => Ok(()),
        }
    }

    fn write(&self, ph: &'static str, slice: &Slice) {
        let ts = self.start.elapsed().as_nanos() as f64 / 1e3;
        let Some(rank) = rank() else { return };
        let event = Event {
            name: &slice.name,
            ph,
            ts,
            pid: PROCESS,
            tid: track(rank),
            args: (ph == "B").then_some(&slice.fields),
        };
        let mut output = self.output();
        if let Output::Open(tracks) = &mut *output
            && let Err(error) = tracks.write(rank, &event)
        {
            *output = Output::Failed(error);
        }
    }

    fn output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tracks {
    fn write(&mut self, rank: usize, event: &Event<'_>) -> io::Result<()> {
        if self.named.insert(rank) {
            let name = naming("thread_name", event.tid, &format!("rank {rank}"));
            write!(self.file, ",\n{name}")?;
        }
        self.file.write_all(b",\n")?;
        Ok(serde_json::to_writer(&mut self.file, event)?)
    }

    fn end(mut self) -> io::Result<()> {
        self.file.write_all(b"\n]\n")?;
        self.file.flush()
    }
}

/// The rank that this thread was started as.
fn rank() -> Option<usize> {
    std::thread::current().name()?.strip_prefix("rank ")?.parse().ok()
}

/// Perfetto puts the track with the number of the process first, then the others by number.
fn track(rank: usize) -> usize {
    PROCESS + rank
}

fn naming(what: &str, tid: usize, name: &str) -> Value {
    json!({"name": what, "ph": "M", "pid": PROCESS, "tid": tid, "args": {"name": name}})
}

impl<S> Layer<S> for Timeline
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        Slice::keep(attributes, id, &context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        Slice::show(context.span(id), |slice| self.write("B", slice));
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        Slice::show(context.span(id), |slice| self.write("E", slice));
    }
}
