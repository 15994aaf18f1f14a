//! What surrounds a rank's code, whatever the engine.

use super::{Address, Control, Hub, Reported, report_on};
use crate::CommError;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Joins the hub and does this rank's work: its code, and the waiting for the others' end. If it fails, everyone is told;
/// rank 0's hub is there until they are.
pub fn run<T>(
    rank: usize,
    size: usize,
    timeout: Duration,
    (hub, address): (Option<Hub>, Address),
    work: impl FnOnce(&Arc<Control>) -> Result<T, CommError>,
) -> Result<T, CommError> {
    let outcome = Control::join(rank, size, timeout, &address).and_then(|control| {
        let failed = |what: &str, error: io::Error| CommError::failed(rank, format!("{what}: {error}"));
        let guarded = control.clone();
        let guard = std::thread::Builder::new()
            .name("guard".into())
            .spawn(move || guarded.guard());
        guard
            .map_err(|error| failed("the thread that guards it cannot be started", error))
            .and_then(|_| {
                report_on(Reported::Running(control.clone())).map_err(|error| failed("its signal handler", error))
            })
            .and_then(|()| work(&control))
            .map_err(|error| {
                let error = control.fail(error);
                control.give_up();
                error
            })
    });
    if let Some(hub) = hub {
        hub.join();
    }
    if outcome.is_ok() {
        // The handler is there already.
        let _ = report_on(Reported::Nothing);
    }
    outcome
}
