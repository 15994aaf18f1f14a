//! Fused attention against Burn's own under autodiff, at 8 heads of 64, causal, f32; then what a sliding window saves of
//! a long sequence, and what dropout costs.
//!
//! After criterion's report, one line a case: best time, GFLOP/s (visible pairs only: 4 x heads x dim a pair forward,
//! 2.5 times that backward), the share of what a large matrix product reaches in the same run, and the peak memory
//! above the inputs.

use std::{
    alloc::{GlobalAlloc, Layout},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{Device, Distribution, Tensor, module, ops::AttentionModuleOptions};
use criterion::{Criterion, Throughput};
use kernels_cubecl::{AttentionDropout, AttentionSpec, HeadMap, Kernels, Mask, Positions, attention};
use mimalloc::MiMalloc;

const HEADS: usize = 8;
const DIM: usize = 64;
const LENGTHS: [usize; 4] = [1024, 2048, 4096, 8192];
/// Burn's own attention holds several score matrices: 2 GB at 4,096 tokens.
const BURN_UP_TO: usize = 4096;
const LONG: usize = 16_384;
const WINDOW: usize = 1024;
const DROPOUT_AT: usize = 2048;

/// mimalloc, counting bytes in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to an allocator that upholds the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's layout.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let now = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's layout.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's pointer and layout, from this allocator.
        unsafe { MiMalloc.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What one case came to.
struct Measured {
    best: Duration,
    peak: usize,
}

/// Runs `case` under criterion and keeps the best time and the peak memory above the state before.
fn measure(criterion: &mut Criterion, name: &str, length: usize, flops: f64, mut case: impl FnMut()) -> Measured {
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let mut best = Duration::MAX;
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(flops as u64));
    group.bench_function(length.to_string(), |bencher| {
        bencher.iter_custom(|iterations| {
            let start = Instant::now();
            for _ in 0..iterations {
                let start = Instant::now();
                case();
                best = best.min(start.elapsed());
            }
            start.elapsed()
        });
    });
    Measured {
        best,
        peak: PEAK.load(Ordering::Relaxed) - before,
    }
}

fn random(shape: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn spec(mask: Mask, length: usize) -> AttentionSpec {
    AttentionSpec {
        mask,
        q_positions: Positions::whole(length),
        k_positions: Positions::whole(length),
        scale: 1.0 / (DIM as f64).sqrt(),
        heads: HeadMap::new(HEADS, HEADS),
        dropout: None,
        wide: false,
    }
}

/// Operations forward: two products over the visible pairs.
fn forward_flops(spec: &AttentionSpec) -> f64 {
    (4 * HEADS * DIM) as f64 * spec.mask.visible_pairs(&spec.q_positions, &spec.k_positions) as f64
}

/// Forward and backward on plain tensors.
fn both([q, k, v, grad]: &[Tensor<4>; 4], spec: &AttentionSpec) {
    let (out, stats) = Flex::attention_forward(primitive(q), primitive(k), primitive(v), spec);
    Flex::attention_backward(
        primitive(q),
        primitive(k),
        primitive(v),
        out,
        stats,
        primitive(grad),
        spec,
    );
}

fn primitive(tensor: &Tensor<4>) -> FloatTensor<Flex> {
    tensor.clone().try_into_primitive::<Flex>().expect("a tensor on Flex")
}

/// GFLOP/s of a large matrix product through Burn.
fn matmul_rate() -> f64 {
    const SIZE: usize = 2048;
    let device = Device::flex();
    let [a, b] = [(); 2].map(|_| Tensor::<2>::random([SIZE; 2], Distribution::Default, &device));
    let best = (0..8).map(|_| {
        let start = Instant::now();
        drop(a.clone().matmul(b.clone()));
        start.elapsed()
    });
    2.0 * (SIZE as f64).powi(3) / best.min().expect("some runs").as_secs_f64() / 1e9
}

fn main() {
    let mut criterion = Criterion::default()
        .without_plots()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(5))
        .configure_from_args();
    let rate = matmul_rate();
    let mut lines = vec![format!("matmul 2048^3: {rate:.0} GFLOP/s")];
    let mut report = |name: &str, length: usize, flops: f64, measured: Measured| {
        if measured.best == Duration::MAX {
            return; // filtered out on the command line
        }
        let seconds = measured.best.as_secs_f64();
        let reached = flops / seconds / 1e9;
        lines.push(format!(
            "{name} {length}: {:.1} ms, {reached:.0} GFLOP/s, {:.0}% of matmul, {:.1} MB above inputs",
            seconds * 1e3,
            100.0 * reached / rate,
            measured.peak as f64 / 1e6
        ));
    };
    for length in LENGTHS {
        let spec = || spec(Mask::Causal, length);
        let forward_flops = forward_flops(&spec());
        let both_flops = 3.5 * forward_flops;
        let device = Device::flex().autodiff();
        let [q, k, v, grad] = [(); 4].map(|_| random([1, length, HEADS, DIM], &device));
        let [plain_q, plain_k, plain_v] = [&q, &k, &v].map(|tensor| tensor.clone().inner());

        let name = "fused forward";
        let measured = measure(&mut criterion, name, length, forward_flops, || {
            attention(plain_q.clone(), plain_k.clone(), plain_v.clone(), spec());
        });
        report(name, length, forward_flops, measured);

        let name = "fused forward+backward";
        let plain = [plain_q, plain_k, plain_v, grad.clone().inner()];
        let measured = measure(&mut criterion, name, length, both_flops, || both(&plain, &spec()));
        report(name, length, both_flops, measured);

        let [q, k, v] = [q, k, v].map(|tensor| tensor.require_grad());
        let name = "fused forward+backward, autodiff";
        let measured = measure(&mut criterion, name, length, both_flops, || {
            let (out, _) = attention(q.clone(), k.clone(), v.clone(), spec());
            (out * grad.clone()).sum().backward();
        });
        report(name, length, both_flops, measured);

        if length <= BURN_UP_TO {
            let name = "Burn forward+backward, autodiff";
            let measured = measure(&mut criterion, name, length, both_flops, || {
                let options = AttentionModuleOptions {
                    is_causal: true,
                    ..Default::default()
                };
                let [q, k, v] = [&q, &k, &v].map(|tensor| tensor.clone().swap_dims(1, 2));
                let out = module::attention(q, k, v, None, None, options);
                (out * grad.clone().swap_dims(1, 2)).sum().backward();
            });
            report(name, length, both_flops, measured);
        }
    }

    let mut compare = |length: usize, cases: [(&str, AttentionSpec); 2]| {
        let inputs = [(); 4].map(|_| random([1, length, HEADS, DIM], &Device::flex()));
        for (name, spec) in cases {
            let flops = 3.5 * forward_flops(&spec);
            let measured = measure(&mut criterion, name, length, flops, || both(&inputs, &spec));
            report(name, length, flops, measured);
        }
    };
    let window = Mask::Window { size: WINDOW, sink: 0 };
    compare(
        LONG,
        [
            ("window: causal forward+backward", spec(Mask::Causal, LONG)),
            ("window: window forward+backward", spec(window, LONG)),
        ],
    );
    let dropout = AttentionDropout {
        probability: 0.1,
        seed: 1,
        stream: 0,
        shape: [1, HEADS, DROPOUT_AT, DROPOUT_AT],
        batch: Positions::whole(1),
        heads: Positions::whole(HEADS),
    };
    let without = spec(Mask::Causal, DROPOUT_AT);
    let with = AttentionSpec {
        dropout: Some(dropout),
        ..without.clone()
    };
    compare(
        DROPOUT_AT,
        [
            ("dropout: none, forward+backward", without),
            ("dropout: a tenth, forward+backward", with),
        ],
    );
    criterion.final_summary();
    println!("\n{}", lines.join("\n"));
}
