//! Who holds how many bytes: an allocator that counts for the rank whose thread asked.
//!
//! A program that wants its memory counted declares
//!
//! ```
//! use burn_sp_examples::memory::Tracking;
//!
//! #[global_allocator]
//! static ALLOCATOR: Tracking = Tracking;
//!
//! let rank = burn_sp_examples::memory::enter(3);
//! let before = rank.live();
//! let block = std::hint::black_box(vec![0u8; 1000]);
//! assert_eq!(rank.live() - before, 1000);
//! ```
//!
//! Blocks come from mimalloc, which keeps its pages: a fresh page costs several times the copy of its bytes.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use mimalloc::MiMalloc;

/// The most ranks that can be told apart.
pub const MAX_RANKS: usize = 256;

/// Threads that are no rank, such as workers of a thread pool, count here.
const SHARED: usize = MAX_RANKS;

/// Blocks from this size on start on a cache line, for vector loads; smaller ones get the smallest header.
const LARGE: usize = 1024;

/// The allocator.
pub struct Tracking;

/// Apart by a cache line, so that ranks do not slow each other down.
#[repr(align(128))]
struct Slot {
    live: AtomicUsize,
    peak: AtomicUsize,
}

static SLOTS: [Slot; MAX_RANKS + 1] = [const {
    Slot {
        live: AtomicUsize::new(0),
        peak: AtomicUsize::new(0),
    }
}; MAX_RANKS + 1];
static INSTALLED: AtomicBool = AtomicBool::new(false);
static UNRANKED: AtomicUsize = AtomicUsize::new(SHARED);

thread_local! {
    // Constant and without a destructor: reading it neither allocates nor fails while a thread ends.
    static RANK: Cell<Option<usize>> = const { Cell::new(None) };
}

impl Slot {
    fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        // A new peak is rare, so look before writing.
        if live > self.peak.load(Relaxed) {
            self.peak.fetch_max(live, Relaxed);
        }
    }

    fn subtract(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Relaxed);
    }
}

/// A thread's membership in a rank, or the blocks of all threads that are in none; made by [`enter`] and [`unranked`].
#[derive(Debug)]
pub struct Account {
    slot: usize,
    /// What the thread was before, if dropping this ends its membership.
    previous: Option<Option<usize>>,
    // It speaks of the thread it was made on.
    not_send: PhantomData<*const ()>,
}

/// Counts what this thread allocates for a rank, until the result is dropped.
///
/// # Panics
/// If the rank is not below [`MAX_RANKS`].
pub fn enter(rank: usize) -> Account {
    assert!(rank < MAX_RANKS, "memory: rank {rank} is not below {MAX_RANKS}");
    Account {
        slot: rank,
        previous: Some(RANK.replace(Some(rank))),
        not_send: PhantomData,
    }
}

/// The blocks of all threads that are no rank.
pub fn unranked() -> Account {
    Account {
        slot: SHARED,
        previous: None,
        not_send: PhantomData,
    }
}

/// The rank for which threads count that are none themselves: the only one of this process, as they all work for it.
pub fn unranked_work_for(rank: Option<usize>) {
    UNRANKED.store(rank.unwrap_or(SHARED), Relaxed);
}

/// Whether threads that are no rank count for one.
pub fn unranked_work_for_a_rank() -> bool {
    UNRANKED.load(Relaxed) != SHARED
}

/// The most memory that this process had resident, in bytes, as the system counts it; none where that is not known.
pub fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

/// Whether this process allocates through [`Tracking`]; if not, all figures are 0.
pub fn measured() -> bool {
    INSTALLED.load(Relaxed)
}

impl Account {
    /// Bytes held now.
    pub fn live(&self) -> usize {
        SLOTS[self.slot].live.load(Relaxed)
    }

    /// The most bytes held at once since the last [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> usize {
        SLOTS[self.slot].peak.load(Relaxed)
    }

    /// Starts a new peak at what is held now.
    pub fn reset_peak(&self) {
        SLOTS[self.slot].peak.store(self.live(), Relaxed);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            RANK.set(previous);
        }
    }
}

/// Room before a block of this layout, where the slot it is charged to is kept; a multiple of the alignment.
fn header(layout: Layout) -> usize {
    let room = if layout.size() >= LARGE { 64 } else { 16 };
    layout.align().max(room)
}

/// The layout of header and block, or none if there is no such size.
fn with_header(layout: Layout) -> Option<Layout> {
    let header = header(layout);
    Layout::from_size_align(layout.size().checked_add(header)?, header).ok()
}

fn charge(bytes: usize) -> usize {
    if !INSTALLED.load(Relaxed) {
        INSTALLED.store(true, Relaxed);
    }
    let slot = RANK.get().unwrap_or_else(|| UNRANKED.load(Relaxed));
    SLOTS[slot].add(bytes);
    slot
}

/// Charges a block to this thread and writes down whom; returns where the user's part begins.
///
/// # Safety
/// `start` must be null or the start of an allocation of `with_header(layout)`.
unsafe fn open(start: *mut u8, layout: Layout) -> *mut u8 {
    if start.is_null() {
        return start;
    }
    // SAFETY: the allocation holds the header before the block, so the result lies within it.
    let block = unsafe { start.add(header(layout)) };
    // SAFETY: the word before the block lies in the header (at least 16 bytes) and is aligned, since the block's address
    // is a multiple of the header's size.
    unsafe { block.cast::<usize>().sub(1).write(charge(layout.size())) };
    block
}

/// The slot that a block is charged to.
///
/// # Safety
/// `block` must come from [`open`].
unsafe fn owner(block: *mut u8) -> &'static Slot {
    // SAFETY: `open` wrote a slot's index into the word before the block, and users write to the block only.
    &SLOTS[unsafe { block.cast::<usize>().sub(1).read() }]
}

// SAFETY: every block is a part of a block of mimalloc's, aligned as asked because the header is a multiple of the
// alignment; sizes and addresses are computed from the same layout at allocation and release.
unsafe impl GlobalAlloc for Tracking {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(whole) = with_header(layout) else {
            return std::ptr::null_mut();
        };
        // SAFETY: `whole` is not empty, as it holds the header, and `open` gets the layout it was made from.
        unsafe { open(MiMalloc.alloc(whole), layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(whole) = with_header(layout) else {
            return std::ptr::null_mut();
        };
        // SAFETY: as in `alloc`; the header is written, the block stays zero.
        unsafe { open(MiMalloc.alloc_zeroed(whole), layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` came from this allocator with `layout`, so its layout with header exists and its start lies
        // one header before it.
        unsafe {
            owner(block).subtract(layout.size());
            let room = header(layout);
            let whole = Layout::from_size_align_unchecked(layout.size() + room, room);
            MiMalloc.dealloc(block.sub(room), whole);
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(new) = Layout::from_size_align(size, layout.align()) else {
            return std::ptr::null_mut();
        };
        let room = header(layout);
        let Some(whole) = with_header(new).filter(|_| header(new) == room) else {
            // The block would have to move within its allocation.
            // SAFETY: `block` is valid for `layout`; the new one does not overlap it.
            unsafe {
                let moved = self.alloc(new);
                if !moved.is_null() {
                    std::ptr::copy_nonoverlapping(block, moved, layout.size().min(size));
                    self.dealloc(block, layout);
                }
                return moved;
            }
        };
        // SAFETY: as in `dealloc`; the header is the same for both sizes and moves with its block. A block that fails to
        // grow stays as it is, and so does its charge; one that grows is charged to this thread from now on.
        unsafe {
            let old = Layout::from_size_align_unchecked(layout.size() + room, room);
            let owner = owner(block);
            let start = MiMalloc.realloc(block.sub(room), old, whole.size());
            if start.is_null() {
                return start;
            }
            owner.subtract(layout.size());
            open(start, new)
        }
    }
}
