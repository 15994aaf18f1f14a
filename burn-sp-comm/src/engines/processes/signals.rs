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
/// launcher. Launchers mostly wait about a second before they kill; Open MPI only until another process ends.
const MOMENT: Duration = Duration::from_millis(400);

/// What there is to report on.
#[derive(Clone)]
pub enum Reported {
    /// Nothing: no rank has started, or it has ended well.
    Nothing,
    /// A rank that waits for the others to start, and its number if it is known.
    Starting { rank: Option<usize> },
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
        let free: Vec<i32> = [SIGTERM, SIGINT]
            .into_iter()
            .filter(|signal| is_free(*signal))
            .collect();
        let mut signals = Signals::new(free)?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let reported = lock(&REPORTED).clone();
                let name = signal_name(signal).unwrap_or("a signal");
                match reported {
                    Reported::Nothing => {}
                    Reported::Starting { rank } => {
                        let rank = rank.map_or("a rank".into(), |rank| format!("rank {rank}"));
                        complain(format_args!(
                            "error: {rank} was ended by {name}: waiting for all ranks to start"
                        ));
                        // Some launchers kill the others as soon as one has ended.
                        std::thread::sleep(MOMENT);
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
    let (rank, mut told) = (control.rank(), control.failure());
    // At once, as nobody knows when the launcher kills, or whether the program comes to print it itself.
    match &told {
        Some(error) => complain(format_args!("error: {error} (rank {rank} was then ended by {name})")),
        None if control.has_ended() => {}
        None => complain(format_args!(
            "error: rank {rank} was ended by {name}: {}",
            control.activity()
        )),
    }
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
        if told.is_none()
            && let Some(error) = control.failure()
        {
            complain(format_args!("error: {error}"));
            told = Some(error);
        }
    }
}

/// Whether the program has left a signal as it was: what it does itself about one, or ignores, is left to it.
fn is_free(signal: i32) -> bool {
    // SAFETY: a handler of nothing but zeros may be overwritten, and nothing is changed.
    unsafe {
        let mut handler: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut handler) == 0 && handler.sa_sigaction == libc::SIG_DFL
    }
}

/// A line on stderr, if anybody listens: a thread that must go on cannot end for a broken pipe.
pub fn complain(line: std::fmt::Arguments) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
