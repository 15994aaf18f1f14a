//! A last report when the process is told to end, as launchers do to the survivors when a rank has died.

use super::Control;
use crate::engines::shared::lock;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How long the report of a failure may come after the signal: the hub may hear of a death a little later than the
/// launcher. Launchers wait a second or more before they kill.
const MOMENT: Duration = Duration::from_millis(400);

/// What there is to report on.
#[derive(Clone)]
pub enum Reported {
    /// Nothing: no rank has started, or it has ended well.
    Nothing,
    /// A rank that waits for the others to start.
    Starting { rank: usize },
    /// A rank that is running, or has failed.
    Running(Arc<Control>),
}

static REPORTED: Mutex<Reported> = Mutex::new(Reported::Nothing);

/// From now on a report on this is printed if the process is told to end.
///
/// # Errors
/// If the handler cannot be installed.
pub fn report_on(reported: Reported) -> std::io::Result<()> {
    static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();
    *lock(&REPORTED) = reported;
    let install = || -> std::io::Result<()> {
        let mut signals = Signals::new([SIGTERM, SIGINT])?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let reported = lock(&REPORTED).clone();
                let name = signal_name(signal).unwrap_or("a signal");
                match reported {
                    Reported::Nothing => {}
                    Reported::Starting { rank } => {
                        complain(format_args!(
                            "error: rank {rank} was ended by {name}: waiting for all ranks to start"
                        ));
                    }
                    Reported::Running(control) => report(&control, name),
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

fn report(control: &Control, name: &str) {
    let until = Instant::now() + MOMENT;
    while control.failure().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    if control.has_ended() {
        // The program is about to print what there is to say, and to end.
        std::thread::sleep(MOMENT);
    }
    let rank = control.rank();
    match control.failure() {
        Some(error) => complain(format_args!("error: {error} (rank {rank} was then ended by {name})")),
        None if control.has_ended() => {}
        None => complain(format_args!(
            "error: rank {rank} was ended by {name}: {}",
            control.activity()
        )),
    }
}

/// A line on stderr, if anybody listens: a thread that must go on cannot end for a broken pipe.
pub fn complain(line: std::fmt::Arguments) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
