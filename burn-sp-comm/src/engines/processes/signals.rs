//! A last report when the process is told to end, as launchers do to the survivors when a rank has died.

use super::Control;
use crate::engines::shared::lock;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How long the report of a failure may come after the signal: the hub may hear of a death a little later than the
/// launcher. Launchers wait a second or more before they kill.
const MOMENT: Duration = Duration::from_millis(400);

/// The rank that is running in this process.
static RUNNING: Mutex<Weak<Control>> = Mutex::new(Weak::new());

/// From now on a report on `control` is printed if the process is told to end.
///
/// # Errors
/// If the handler cannot be installed.
pub fn report_on(control: &Arc<Control>) -> std::io::Result<()> {
    static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();
    *lock(&RUNNING) = Arc::downgrade(control);
    let install = || -> std::io::Result<()> {
        let mut signals = Signals::new([SIGTERM, SIGINT])?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let control = lock(&RUNNING).upgrade();
                if let Some(control) = control {
                    report(&control, signal);
                }
                // What would have happened without a handler.
                let _ = emulate_default_handler(signal);
            }
        })?;
        Ok(())
    };
    let installed = INSTALLED.get_or_init(|| install().map_err(|error| error.to_string()));
    installed.clone().map_err(std::io::Error::other)
}

fn report(control: &Control, signal: i32) {
    let until = Instant::now() + MOMENT;
    while control.failure().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (rank, name) = (control.rank(), signal_name(signal).unwrap_or("a signal"));
    match control.failure() {
        // The program is about to print it, or has.
        Some(_) if control.has_ended() => std::thread::sleep(MOMENT),
        Some(error) => eprintln!("error: {error} (rank {rank} was then ended by {name})"),
        None if control.has_ended() => {}
        None => eprintln!("error: rank {rank} was ended by {name}: {}", control.activity()),
    }
}
