//! Where ranks get their items from.

use std::sync::mpsc::{Receiver, Sender, channel};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::Device;
use burn::train::Interrupter;

use super::SpStep;

/// What a loader gives.
#[derive(Clone)]
pub(super) enum Next<I> {
    /// An item, and how far it is then.
    Item(I, Progress),
    /// There are no more.
    End,
    /// It cannot go on; the interrupter knows why.
    Failed,
}

/// A rank's source of items. Of the ranks of a process the first reads the loaders, whose order of items depends on who
/// asks for how many passes, and gives the others what it got.
pub(super) enum Feed<I> {
    Reads(Vec<Follower<I>>),
    Follows(Receiver<Next<I>>),
}

/// A rank that gets its items from another.
pub(super) struct Follower<I> {
    /// If it is another than that of the one who reads.
    device: Option<Device>,
    sender: Sender<Next<I>>,
}

/// Of the ranks of this process, on these devices.
pub(super) fn feeds<I>(devices: &[Device]) -> Vec<Feed<I>> {
    let (mut followers, mut feeds) = (Vec::new(), Vec::new());
    for device in &devices[1..] {
        let (sender, receiver) = channel();
        let device = (*device != devices[0]).then(|| device.clone());
        followers.push(Follower { device, sender });
        feeds.push(Feed::Follows(receiver));
    }
    feeds.insert(0, Feed::Reads(followers));
    feeds
}

impl<I: Clone + Send + 'static> Feed<I> {
    /// All items of a loader, once; `training` on devices with autodiff.
    pub fn pass<'a>(&'a self, loader: &'a dyn DataLoader<I>, training: bool) -> Pass<'a, I> {
        match self {
            Feed::Reads(followers) => Pass::Reads {
                iterator: loader.iter(),
                followers,
                training,
            },
            Feed::Follows(receiver) => Pass::Follows(receiver),
        }
    }
}

pub(super) enum Pass<'a, I> {
    Reads {
        iterator: Box<dyn DataLoaderIterator<I> + 'a>,
        followers: &'a [Follower<I>],
        training: bool,
    },
    Follows(&'a Receiver<Next<I>>),
}

impl<I: Clone> Pass<'_, I> {
    /// The next item; none if the rank that reads is gone, as it is after a failure only.
    pub fn next<M: SpStep<Input = I>>(&mut self, interrupter: &Interrupter) -> Option<Next<I>> {
        let (iterator, followers, training) = match self {
            Pass::Follows(receiver) => return receiver.recv().ok(),
            Pass::Reads {
                iterator,
                followers,
                training,
            } => (iterator, followers, *training),
        };
        let next = match iterator.next() {
            Some(Ok(item)) => Next::Item(item, iterator.progress()),
            Some(Err(error)) => {
                interrupter.fail(error);
                Next::Failed
            }
            None => Next::End,
        };
        for Follower { device, sender } in followers.iter() {
            let theirs = match (next.clone(), device) {
                (Next::Item(item, progress), Some(device)) => {
                    let device = device.clone();
                    let device = if training { device } else { device.inner() };
                    Next::Item(M::move_item(item, &device), progress)
                }
                (next, _) => next,
            };
            // One that is gone has failed: the next collective says why.
            let _ = sender.send(theirs);
        }
        Some(next)
    }
}
