//! Where ranks come in to the hub: who belongs to the run is let in and listened to, each on a thread of its own.

use super::wire::{STUCK, ToHub, ToRank, receive, send};
use crate::engines::shared::text;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

/// A rank's line. It may have had others before, on which it gave up.
pub struct Line {
    pub number: u64,
    pub stream: TcpStream,
}

/// What the hub's thread hears.
pub enum Event {
    Line { rank: usize, line: Line },
    Message { rank: usize, message: ToHub },
    Closed { rank: usize, number: u64, why: String },
}

/// Where ranks come in.
#[derive(Clone)]
pub struct Gate {
    pub size: usize,
    pub cookie: u64,
    pub silence: Duration,
    pub lines: Arc<AtomicU64>,
    pub events: Sender<Event>,
}

impl Gate {
    /// Greets whoever comes, each on a thread of its own, so that a stranger holds up nobody.
    pub fn stand_open(&self, listener: &TcpListener, shut: &AtomicBool) {
        // Accepting cannot time out, so it looks now and then.
        if listener.set_nonblocking(true).is_err() {
            return;
        }
        while !shut.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((line, _)) => {
                    let gate = self.clone();
                    let greet = std::thread::Builder::new().name("hub's ear".into());
                    // If there is no thread for it, the rank tries again.
                    let _ = greet.spawn(move || gate.admit(line));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Lets a rank in, and listens to it.
    fn admit(self, mut line: TcpStream) {
        let Gate { events, silence, .. } = self;
        let greeted = line
            .set_nonblocking(false)
            .and_then(|()| line.set_nodelay(true))
            .and_then(|()| line.set_read_timeout(Some(STUCK)))
            .and_then(|()| receive(&mut line));
        let Ok(ToHub::Hello { cookie, rank }) = greeted else {
            return; // A stranger.
        };
        if cookie != self.cookie || rank >= self.size {
            return;
        }
        let ready = line
            .set_read_timeout(Some(silence))
            .and_then(|()| line.set_write_timeout(Some(STUCK)))
            .and_then(|()| send(&mut line, &ToRank::Admitted))
            .and_then(|()| line.try_clone());
        let Ok(mut ear) = ready else { return };
        // Sending fails only when the hub has ended.
        let number = self.lines.fetch_add(1, Ordering::Relaxed);
        let line = Line { number, stream: line };
        if events.send(Event::Line { rank, line }).is_err() {
            return;
        }
        let why = loop {
            match receive(&mut ear) {
                Ok(message) => drop(events.send(Event::Message { rank, message })),
                Err(error) => break ending(&error, silence),
            }
        };
        drop(events.send(Event::Closed { rank, number, why }));
    }
}

/// What it means that a line ends.
pub fn ending(error: &io::Error, silence: Duration) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => "its process ended without a farewell".into(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!(
                "nothing was heard of it for {}: its host or the network is down, or it is stopped",
                text(silence)
            )
        }
        _ => format!("its line broke: {error}"),
    }
}
