//! Memory a thread keeps between tasks: a fresh page costs several times the copy of its bytes.

use std::cell::RefCell;

use bytemuck::{Pod, Zeroable};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u64; 8]);

thread_local! {
    static LINES: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `N` slices of the given lengths, each aligned to a cache line. Their content is left over from
/// earlier calls.
///
/// `work` must not call this function again on the same thread.
pub fn with<A: Pod, const N: usize, R>(lengths: [usize; N], work: impl FnOnce([&mut [A]; N]) -> R) -> R {
    let lines = |len: usize| (len * size_of::<A>()).div_ceil(size_of::<CacheLine>());
    LINES.with_borrow_mut(|buffer| {
        let total = lengths.iter().map(|&len| lines(len)).sum();
        if buffer.len() < total {
            buffer.resize(total, CacheLine::zeroed());
        }
        let mut rest = buffer.as_mut_slice();
        work(lengths.map(|len| {
            let (taken, left) = std::mem::take(&mut rest).split_at_mut(lines(len));
            rest = left;
            &mut bytemuck::cast_slice_mut(taken)[..len]
        }))
    })
}
