//! What this rank has put on its device's streams and has not seen done: a thread looks after it, as the rank itself does
//! not wait.

use super::link::Link;
use super::world::Group;
use crate::CommError;
use crate::engines::processes::Control;
use crate::engines::shared::activity::Call;
use crate::engines::shared::{lock, names};
use cudarc::driver::{CudaContext, CudaEvent, DriverError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the thread sleeps between two looks.
const NAP: Duration = Duration::from_millis(5);

/// A collective on its way.
pub struct UnderWay {
    /// Done when the stream comes to the collective: before, the device is busy with the rank's own work.
    pub begun: CudaEvent,
    pub done: CudaEvent,
    pub call: Call,
    pub group: Arc<Group>,
    pub link: Arc<Link>,
    /// When the device was first seen to have begun.
    pub since: Option<Instant>,
}

/// The collectives on their way.
pub struct Watch {
    control: Arc<Control>,
    list: Mutex<List>,
    changed: Condvar,
}

#[derive(Default)]
struct List {
    under_way: Vec<UnderWay>,
    over: bool,
}

impl Watch {
    /// Starts the thread.
    pub fn start(control: &Arc<Control>, context: &Arc<CudaContext>) -> std::io::Result<Arc<Watch>> {
        let watch = Arc::new(Watch {
            control: control.clone(),
            list: Mutex::default(),
            changed: Condvar::new(),
        });
        let (watching, context) = (watch.clone(), context.clone());
        std::thread::Builder::new()
            .name("watch of nccl".into())
            .spawn(move || {
                if let Err(error) = context.bind_to_thread() {
                    watching.failed(error);
                }
                watching.run();
            })?;
        Ok(watch)
    }

    pub fn add(&self, under_way: UnderWay) {
        lock(&self.list).under_way.push(under_way);
        self.changed.notify_all();
    }

    /// Waits until nothing is under way any more.
    ///
    /// # Errors
    /// The world's failure, which comes at the latest when something under way is late.
    pub fn idle(&self) -> Result<(), CommError> {
        let mut list = lock(&self.list);
        loop {
            if let Some(error) = self.control.failure() {
                return Err(error);
            }
            if list.under_way.is_empty() {
                return Ok(());
            }
            // The failure has no signal here.
            let wait = self.changed.wait_timeout(list, 4 * NAP);
            list = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the thread.
    pub fn stop(&self) {
        lock(&self.list).over = true;
        self.changed.notify_all();
    }

    fn run(&self) {
        let mut list = lock(&self.list);
        while !list.over && self.control.failure().is_none() {
            if list.under_way.is_empty() {
                // Woken by what comes, or by the end; a failure may come without.
                let wait = self.changed.wait_timeout(list, Duration::from_millis(200));
                list = wait.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            match look(&mut list.under_way, &self.control) {
                Ok(None) => {}
                Ok(Some(verdict)) => {
                    drop(list);
                    return self.speak(verdict);
                }
                Err(error) => {
                    drop(list);
                    return self.failed(error);
                }
            }
            self.changed.notify_all();
            drop(list);
            std::thread::sleep(NAP);
            list = lock(&self.list);
        }
    }

    fn speak(&self, verdict: Verdict) {
        match verdict {
            Verdict::Fault(fault) => self.control.fail(CommError::failed(self.control.rank(), fault)),
            Verdict::Left { rank, waiting } => self.control.departed(rank, waiting),
            Verdict::Late { waiting } => self.control.late(waiting),
        };
    }

    fn failed(&self, error: DriverError) {
        self.speak(Verdict::Fault(format!("CUDA: {error}")));
    }
}

/// Why the world is to fail.
enum Verdict {
    Fault(String),
    Left { rank: usize, waiting: String },
    Late { waiting: String },
}

/// Takes out what is done, and judges the rest.
fn look(list: &mut Vec<UnderWay>, control: &Control) -> Result<Option<Verdict>, DriverError> {
    let mut fault = Ok(());
    list.retain(|under_way| match under_way.done.try_is_complete() {
        Ok(done) => !done,
        Err(error) => {
            fault = Err(error);
            true
        }
    });
    fault?;
    for under_way in list {
        let UnderWay { call, group, .. } = under_way;
        if let Some(fault) = under_way.link.fault() {
            return Ok(Some(Verdict::Fault(format!("{fault}, in {call}"))));
        }
        let since = match under_way.since {
            Some(since) => since,
            None if under_way.begun.try_is_complete()? => *under_way.since.insert(Instant::now()),
            None => continue,
        };
        let others: Vec<usize> = group.others(control.rank()).collect();
        let rank = control.rank();
        if let Some(left) = others
            .iter()
            .find(|other| control.has_left(**other, group.id, call.sequence))
        {
            return Ok(Some(Verdict::Left {
                rank: *left,
                waiting: format!("rank {rank} is in {call}, waiting for {}", names([*left])),
            }));
        }
        if since.elapsed() >= control.timeout() {
            let waiting = call.waited(rank, control.timeout(), &names(others));
            return Ok(Some(Verdict::Late { waiting }));
        }
    }
    Ok(None)
}
