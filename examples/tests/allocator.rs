//! The allocator that counts by rank: charges, alignment, growth.

use std::alloc::{GlobalAlloc, Layout};

use burn_sp_examples::memory::{Tracking, enter, measured, unranked};

/// Blocks from this size on start on a cache line.
const LARGE: usize = 1024;

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

// Each test uses ranks of its own, as tests run side by side.

fn block(bytes: usize) -> Vec<u8> {
    std::hint::black_box(Vec::with_capacity(bytes))
}

#[test]
fn a_rank_is_charged_for_what_its_thread_allocates() {
    assert!(measured());
    let rank = enter(10);
    let before = rank.live();
    rank.reset_peak();
    let first = block(3000);
    let second = block(100);
    assert_eq!(rank.live() - before, 3100);
    drop(first);
    assert_eq!((rank.live() - before, rank.peak() - before), (100, 3100));
    rank.reset_peak();
    assert_eq!(rank.peak() - before, 100);
    drop(second);
    assert_eq!(rank.live(), before);
}

#[test]
fn a_block_freed_elsewhere_is_taken_off_its_owner() {
    let owner = enter(20);
    let before = owner.live();
    let moved = block(5000);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let other = enter(21);
            let before = other.live();
            drop(moved);
            assert_eq!(other.live(), before);
        });
    });
    // The thread's own bookkeeping was allocated here too and may still be there.
    assert!(owner.live() - before < 2000, "{}", owner.live() - before);
}

#[test]
fn membership_ends_and_nests() {
    let outer = enter(30);
    let before = outer.live();
    let inner = enter(31);
    let held = block(700);
    drop(inner);
    assert_eq!(outer.live(), before);
    let own = block(600);
    assert_eq!(outer.live() - before, 600);
    drop((held, own));
    assert_eq!(outer.live(), before);
}

#[test]
fn blocks_grow_and_shrink_with_their_bytes_and_their_charge() {
    let rank = enter(40);
    let before = rank.live();
    let mut bytes: Vec<u8> = block(10);
    // Across the size from which the header is larger, both ways, and far enough to move.
    for size in [10, 900, 1023, 1024, 5000, 3_000_000, 2000, 1024, 1023, 12] {
        let old = bytes.len();
        bytes.resize(size, 0);
        bytes.shrink_to_fit();
        for (index, byte) in bytes.iter_mut().enumerate().skip(old) {
            *byte = index as u8;
        }
        let right = bytes.iter().enumerate().all(|(index, byte)| *byte == index as u8);
        assert!(right, "{size}");
        assert_eq!(rank.live() - before, size);
    }
    drop(bytes);
    assert_eq!(rank.live(), before);
}

#[test]
fn any_alignment_is_kept_and_zeroed_blocks_are_zero() {
    for align in [1, 2, 8, 16, 32, 64, 256, 4096] {
        for size in [1, 24, 1000, 1024, 100_000] {
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: the block is used within its size and released with its layout.
            unsafe {
                let block = ALLOCATOR.alloc_zeroed(layout);
                assert_eq!(block as usize % align, 0, "{layout:?}");
                assert!(size < LARGE || (block as usize).is_multiple_of(64), "{layout:?}");
                assert!((0..size).all(|index| block.add(index).read() == 0), "{layout:?}");
                ALLOCATOR.dealloc(block, layout);
            }
        }
    }
}

#[test]
fn threads_without_a_rank_share_an_account() {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let shared = unranked();
            shared.reset_peak();
            let held = block(50_000_000);
            assert!(shared.live() >= 50_000_000);
            drop(held);
            assert!(shared.peak() >= 50_000_000);
        });
    });
}

#[test]
fn a_size_that_does_not_exist_is_refused() {
    let layout = Layout::from_size_align(isize::MAX as usize, 1).unwrap();
    // SAFETY: a null result is not used.
    assert!(unsafe { ALLOCATOR.alloc(layout) }.is_null());
}
