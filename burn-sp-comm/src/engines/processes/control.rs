//! A rank's end of its line to the hub: what the process knows of the world, and how it tells the world of itself.

use super::gate::ending;
use super::hub::{Address, late};
use super::signals::complain;
use super::wire::{Called, PULSE, ToHub, ToRank, receive, send, silence};
use crate::CommError;
use crate::engines::shared::activity::Activity;
use crate::engines::shared::counters::Counters;
use crate::engines::shared::fingerprint::Fingerprint;
use crate::engines::shared::{deadline, lock, text};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a rank waits for the hub's word on a failure before it goes by its own.
const WORD: Duration = Duration::from_secs(2);

/// How long a rank waits for the others to end too, after a failure.
const FAREWELL: Duration = Duration::from_secs(1);

/// How long a rank's code may go on after the world has failed, before its process is ended.
const GRACE: Duration = Duration::from_secs(10);

unsafe extern "C" {
    fn _exit(code: std::ffi::c_int) -> !;
}

/// What a process knows of the world, and its line to the hub.
pub struct Control {
    rank: usize,
    size: usize,
    timeout: Duration,
    failure: OnceLock<CommError>,
    activity: Mutex<Activity>,
    counters: Mutex<Counters>,
    line: Mutex<TcpStream>,
    news: Mutex<News>,
    changed: Condvar,
}

/// What the hub has said so far.
#[derive(Default)]
pub(super) struct News {
    welcome: bool,
    /// Of ranks whose code has ended well: how many collectives they called, by group.
    finished: HashMap<usize, HashMap<u64, u64>>,
    /// Calls by (group, sequence, global rank), until they are asked for.
    pub calls: HashMap<(u64, u64, usize), Fingerprint>,
    /// By (sender, what it is about), until they are asked for.
    pub letters: HashMap<(usize, u64), Vec<u8>>,
    all_ended: bool,
    /// This rank's code has ended.
    ended: bool,
    on_failure: Vec<Box<dyn FnOnce() + Send>>,
}

impl News {
    pub fn has_left(&self, rank: usize, group: u64, sequence: u64) -> bool {
        let called = |called: &HashMap<u64, u64>| called.get(&group).copied().unwrap_or(0);
        self.finished.get(&rank).is_some_and(|all| called(all) <= sequence)
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// Opens this rank's line and waits until all ranks have theirs, at most for the timeout.
    ///
    /// # Errors
    /// If no address of the hub can be reached, or another rank does not come.
    pub fn join(rank: usize, size: usize, timeout: Duration, hub: &Address) -> Result<Arc<Control>, CommError> {
        let failed = |what: String| CommError::failed(rank, what);
        let deadline = deadline(timeout);
        let cookie = hub.cookie;
        let line = connect(&hub.addresses, deadline, &ToHub::Hello { cookie, rank }).map_err(|error| {
            failed(format!(
                "rank 0 cannot be reached on any of {:?}: {error}; open its ports to the other hosts",
                hub.addresses
            ))
        })?;
        let mut ear = line
            .set_read_timeout(Some(silence(timeout)))
            .and_then(|()| line.try_clone())
            .map_err(|error| failed(format!("its line to rank 0: {error}")))?;
        let control = Arc::new(Control {
            rank,
            size,
            timeout,
            failure: OnceLock::new(),
            activity: Mutex::new(Activity::new()),
            counters: Mutex::default(),
            line: Mutex::new(line),
            news: Mutex::default(),
            changed: Condvar::new(),
        });
        let listener = control.clone();
        let listen = move || {
            while let Some(message) = listener.hear(receive(&mut ear)) {
                listener.note(message);
            }
        };
        std::thread::Builder::new()
            .name("line to the hub".into())
            .spawn(listen)
            .map_err(|error| failed(format!("the thread of its line cannot be started: {error}")))?;
        // The hub itself keeps the deadline; a little longer, so that its report arrives.
        match control.await_news(Some(deadline + WORD), |news| news.welcome.then_some(())) {
            Some(()) => Ok(control),
            None => Err(control.failure().unwrap_or_else(|| CommError::Timeout {
                report: format!("rank {rank} waited {} for all ranks to start", text(timeout)),
            })),
        }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Why the world has failed, if it has.
    pub fn failure(&self) -> Option<CommError> {
        self.failure.get().cloned()
    }

    /// This rank's line on the board.
    pub fn activity(&self) -> MutexGuard<'_, Activity> {
        lock(&self.activity)
    }

    pub fn counters(&self) -> MutexGuard<'_, Counters> {
        lock(&self.counters)
    }

    /// Calls `then` when the world fails, on another thread; at once if it has failed. It must not block.
    #[cfg(feature = "nccl")]
    pub fn on_failure(&self, then: impl FnOnce() + Send + 'static) {
        let mut news = lock(&self.news);
        match self.failure.get() {
            Some(_) => {
                drop(news);
                then();
            }
            None => news.on_failure.push(Box::new(then)),
        }
    }

    /// Fails the world because of this rank. Returns the error that counts: the first of all ranks.
    pub fn fail(&self, error: CommError) -> CommError {
        self.ask(&ToHub::Failed(error.clone()), error)
    }

    /// Fails the world because this rank has waited for too long: `waiting` says where, and for whom.
    pub fn late(&self, waiting: String) -> CommError {
        self.in_vain(waiting, None)
    }

    /// Fails the world because this rank waits for one whose code has ended.
    pub fn departed(&self, rank: usize, waiting: String) -> CommError {
        self.in_vain(waiting, Some(rank))
    }

    fn in_vain(&self, waiting: String, left: Option<usize>) -> CommError {
        let doing = self.activity().to_string();
        let alone = late(
            &waiting,
            left,
            &format!("rank {}: {doing}; rank 0 does not answer", self.rank),
        );
        self.ask(&ToHub::Late { waiting, left }, alone)
    }

    /// Sends what leads to a failure and waits for the hub's word; goes by `otherwise` if none comes.
    fn ask(&self, message: &ToHub, otherwise: CommError) -> CommError {
        if let Some(error) = self.failure() {
            return error;
        }
        self.tell(message);
        self.await_news(Some(Instant::now() + WORD), |_| None::<()>);
        self.set_failure(otherwise)
    }

    /// Whether the code of a rank has ended well without having called this collective, which it will not call any more.
    pub fn has_left(&self, rank: usize, group: u64, sequence: u64) -> bool {
        lock(&self.news).has_left(rank, group, sequence)
    }

    /// Says that this rank's code has ended well, after `called` collectives by group.
    pub fn announce_end(&self, called: Called) {
        let doing = {
            let mut activity = self.activity();
            activity.finished();
            activity.to_string()
        };
        self.tell(&ToHub::Finished { called, doing });
    }

    /// Waits until the code of all ranks has ended well, after this one's has.
    ///
    /// # Errors
    /// If the world fails meanwhile.
    pub fn await_all(&self) -> Result<(), CommError> {
        self.await_news(None, |news| news.all_ended.then_some(()));
        match self.failure() {
            Some(error) => Err(error),
            None => {
                lock(&self.news).ended = true;
                Ok(())
            }
        }
    }

    /// This rank's code has ended after a failure. Waits a moment for the others, so that none is ended by its launcher
    /// before it has the report.
    pub fn give_up(&self) {
        self.activity().panicked();
        self.tell(&ToHub::Ended);
        let mut news = lock(&self.news);
        news.ended = true;
        let until = Instant::now() + FAREWELL;
        while !news.all_ended && Instant::now() < until {
            news = self.wait(news, Some(until));
        }
        self.changed.notify_all();
    }

    /// Whether this rank's code has ended.
    pub fn has_ended(&self) -> bool {
        lock(&self.news).ended
    }

    pub(super) fn tell(&self, message: &ToHub) {
        let mut line = lock(&self.line);
        if send(&mut *line, message).is_err() {
            // What is left of a message would spoil the next one. The thread that listens to the line notices.
            let _ = line.shutdown(Shutdown::Both);
        }
    }

    /// A message, or none if the line is to be listened to no longer.
    fn hear(&self, message: io::Result<ToRank>) -> Option<ToRank> {
        let news = lock(&self.news);
        match message {
            Ok(message) => Some(message),
            Err(_) if news.all_ended || news.ended => None,
            Err(error) => {
                drop(news);
                let doing = self.activity().to_string();
                let report = ending(&error, silence(self.timeout));
                self.set_failure(CommError::Died {
                    rank: 0,
                    report: format!("{report}. rank {}: {doing}", self.rank),
                });
                // There is no word to wait for any more.
                lock(&self.news).all_ended = true;
                self.changed.notify_all();
                None
            }
        }
    }

    fn note(&self, message: ToRank) {
        match message {
            ToRank::WhatAreYouDoing => {
                let doing = self.activity().to_string();
                return self.tell(&ToHub::Doing(doing));
            }
            ToRank::Failed(error) => return drop(self.set_failure(error)),
            ToRank::Admitted | ToRank::Alive => {}
            ToRank::Welcome => lock(&self.news).welcome = true,
            ToRank::AllEnded => lock(&self.news).all_ended = true,
            ToRank::Finished { rank, called } => {
                lock(&self.news).finished.insert(rank, called.into_iter().collect());
            }
            ToRank::Called { rank, called } => {
                let key = (called.group, called.sequence, rank);
                lock(&self.news).calls.insert(key, called.fingerprint);
            }
            ToRank::Letter { from, about, bytes } => {
                lock(&self.news).letters.insert((from, about), bytes);
            }
        }
        self.changed.notify_all();
    }

    /// Notes the world's failure, unless there is one, and sees to it that this process ends. Returns the one that counts.
    fn set_failure(&self, error: CommError) -> CommError {
        if self.failure.set(error).is_ok() {
            tracing::debug!(error = %self.failure.wait(), "the world of ranks fails");
            let then = std::mem::take(&mut lock(&self.news).on_failure);
            then.into_iter().for_each(|then| then());
            self.changed.notify_all();
        }
        self.failure.wait().clone()
    }

    /// Tells the hub now and then that this process lives, and ends the process if this rank's code goes on for long after
    /// the world has failed. To be run on a thread of its own, which ends when the rank's code does.
    pub fn guard(&self) {
        let mut news = lock(&self.news);
        let mut pulse = Instant::now() + PULSE;
        while self.failure.get().is_none() && !news.ended {
            news = self.wait(news, Some(pulse));
            if Instant::now() >= pulse {
                pulse = Instant::now() + PULSE;
                drop(news);
                self.tell(&ToHub::Alive);
                news = lock(&self.news);
            }
        }
        let until = Instant::now() + GRACE.min(self.timeout);
        while !news.ended {
            if Instant::now() >= until {
                let error = self.failure.wait();
                let (rank, activity) = (self.rank, self.activity());
                complain(format_args!(
                    "error: {error} (rank {rank} did not come to an end by itself and is ended: {activity})"
                ));
                // SAFETY: it ends the process. Without what the program wants done at its end: its threads may hold the
                // locks for it.
                unsafe { _exit(1) };
            }
            news = self.wait(news, Some(until));
        }
    }

    /// Waits until the news contain something; none if the world fails or the deadline passes before.
    pub(super) fn await_news<R>(
        &self,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut News) -> Option<R>,
    ) -> Option<R> {
        let mut news = lock(&self.news);
        loop {
            if let Some(found) = look(&mut news) {
                return Some(found);
            }
            if self.failure.get().is_some() || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            news = self.wait(news, deadline);
        }
    }

    fn wait<'a>(&self, news: MutexGuard<'a, News>, deadline: Option<Instant>) -> MutexGuard<'a, News> {
        // The failure is not behind the lock, so its signal may come just before one sleeps: no sleep is long.
        const LONG: Duration = Duration::from_millis(100);
        let sleep = deadline.map_or(LONG, |deadline| {
            deadline.saturating_duration_since(Instant::now()).min(LONG)
        });
        self.changed
            .wait_timeout(news, sleep)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}

/// A line to one of the addresses where the hub is. Others of them may lead nowhere, or to a stranger, such as the
/// loopback address of another host; so they are all tried at once, and the first that answers rightly is taken.
fn connect(addresses: &[SocketAddr], deadline: Instant, hello: &ToHub) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "it gave no address");
    while Instant::now() < deadline {
        let (found, lines) = channel();
        for address in addresses {
            let (address, found) = (*address, found.clone());
            let connect = move || drop(found.send(TcpStream::connect_timeout(&address, WORD)));
            std::thread::Builder::new()
                .name("way to the hub".into())
                .spawn(connect)?;
        }
        drop(found);
        for line in lines {
            match line.and_then(|line| greet(line, hello)) {
                Ok(line) => return Ok(line),
                Err(error) => last = error,
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(last)
}

fn greet(mut line: TcpStream, hello: &ToHub) -> io::Result<TcpStream> {
    line.set_nodelay(true)?;
    line.set_write_timeout(Some(WORD))?;
    line.set_read_timeout(Some(WORD))?;
    send(&mut line, hello)?;
    match receive(&mut line)? {
        ToRank::Admitted => Ok(line),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "someone else answers there")),
    }
}
