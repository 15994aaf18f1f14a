//! What it costs that a cache grows: it is copied once in so many tokens, not with each. Alone in its process, as it counts what
//! that allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Tensor};
use burn_sp::attention::{AttentionCache, AttentionOptions, Mask, cached_attention};
use burn_sp::layout::MeshShape;
use burn_sp::{LaunchConfig, SpTensor, launch};

/// Counts bytes that are allocated.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: it is the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_cache_is_not_copied_for_each_token() {
    const TOKENS: usize = 4096;
    const MORE: usize = 128;
    for mask in [Mask::Causal, Mask::Window { size: 3000, sink: 4 }] {
        let options = AttentionOptions::from(mask);
        let config = LaunchConfig::new(MeshShape::default());
        let counted = launch(&config, &Device::flex(), |device| {
            let mut cache = AttentionCache::default();
            let mut read = |count: usize| {
                let x = SpTensor::replicated(Tensor::<4>::ones([1, count, 2, 64], device.device()), &device);
                drop(cached_attention(x.clone(), x.clone(), x, &mut cache, &options));
            };
            read(TOKENS);
            let before = ALLOCATED.load(Ordering::Relaxed);
            (0..MORE).for_each(|_| read(1));
            (ALLOCATED.load(Ordering::Relaxed) - before, cache.bytes())
        });
        let (allocated, cached) = counted.unwrap()[0];
        // Twice each for two runs of tokens, and of what is dropped.
        assert!(
            allocated < 9 * cached,
            "{options:?}: {allocated} bytes for a cache of {cached}"
        );
    }
}
