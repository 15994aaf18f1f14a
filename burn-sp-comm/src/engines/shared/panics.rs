//! The message and the place of a rank's panic, kept for the report instead of being printed.

use crate::CommError;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Once;

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    /// Message and location of this thread's latest panic.
    static LATEST: RefCell<Option<(String, String)>> = const { RefCell::new(None) };
}

/// Puts a hook before the process's panic hook, once. It concerns only threads that asked to be watched.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            // `try_with` fails while the thread's locals are being destroyed; such a panic is not the rank's.
            if WATCHED.try_with(Cell::get).unwrap_or(false) {
                let location = info.location().map(ToString::to_string).unwrap_or_default();
                let _ = LATEST.try_with(|latest| latest.replace(Some((message(info.payload()), location))));
            } else {
                previous(info);
            }
        }));
    });
}

/// Runs a rank's code on this thread. A panic, or an error thrown by [`raise`](crate::raise), becomes an `Err`.
pub fn caught<T>(rank: usize, body: impl FnOnce() -> T) -> Result<T, CommError> {
    install();
    WATCHED.set(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    WATCHED.set(false);
    result.map_err(|payload| match payload.downcast::<CommError>() {
        // The others learn who it was.
        Ok(error) => match *error {
            CommError::Invalid { message } if !message.starts_with("rank ") => CommError::failed(rank, message),
            error => error,
        },
        Err(other) => describe(rank, &*other),
    })
}

/// The error for a panic that was caught on this thread with `payload`.
fn describe(rank: usize, payload: &(dyn Any + Send)) -> CommError {
    let message = message(payload);
    // The latest panic may be another one that the rank caught itself, if this payload came by `resume_unwind` from a
    // worker.
    let latest = LATEST.take().filter(|(recorded, _)| *recorded == message);
    CommError::Panic {
        rank,
        message,
        location: latest.map(|(_, location)| location),
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(error) = payload.downcast_ref::<CommError>() {
        return error.to_string();
    }
    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no message)".into())
}
