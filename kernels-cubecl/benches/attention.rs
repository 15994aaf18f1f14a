//! Fused attention against Burn's own under autodiff, at 8 heads of 64, causal, f32; then what a sliding window saves of
//! a long sequence, and what dropout costs. On Flex; with `--features wgpu` also on the default wgpu device, there both by
//! tiles and by matrix products.
//!
//! After criterion's report, one line a case: best time, GFLOP/s (visible pairs only: 4 x heads x dim a pair forward,
//! 2.5 times that backward), the share of what a large matrix product reaches on the same device in the same run, and the
//! peak memory above the inputs, where that is the host's.

use std::{
    alloc::{GlobalAlloc, Layout},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use burn::backend::{DispatchKindConversion, Flex, tensor::FloatTensor};
use burn::tensor::{Device, DispatchTensor, Distribution, Tensor, module, ops::AttentionModuleOptions};
use criterion::{Criterion, Throughput};
#[cfg(feature = "wgpu")]
use kernels_cubecl::cube::AttentionPath;
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
const FLEX: &str = "flex";

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

/// The benchmarks of one device.
struct Bench<'a> {
    criterion: &'a mut Criterion,
    device: Device,
    label: &'static str,
    /// GFLOP/s of a large matrix product.
    rate: f64,
    /// [`both`] on this device.
    both: fn(&[Tensor<4>; 4], &AttentionSpec),
    lines: &'a mut Vec<String>,
}

impl Bench<'_> {
    /// Runs `case` under criterion and adds a line with the best time and the peak memory above the state before.
    fn measure(&mut self, name: &str, length: usize, flops: f64, mut case: impl FnMut()) {
        let before = IN_USE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let mut best = Duration::MAX;
        let device = &self.device;
        let mut group = self.criterion.benchmark_group(format!("{}: {name}", self.label));
        group.throughput(Throughput::Elements(flops as u64));
        group.bench_function(length.to_string(), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    device.sync().expect("a device that works");
                    let start = Instant::now();
                    case();
                    device.sync().expect("a device that works");
                    let time = start.elapsed();
                    best = best.min(time);
                    total += time;
                }
                total
            });
        });
        group.finish();
        if best == Duration::MAX {
            return; // filtered out on the command line
        }
        let seconds = best.as_secs_f64();
        let reached = flops / seconds / 1e9;
        let mut line = format!(
            "{}: {name} {length}: {:.1} ms, {reached:.0} GFLOP/s, {:.0}% of matmul",
            self.label,
            seconds * 1e3,
            100.0 * reached / self.rate
        );
        if self.label == FLEX {
            let peak = PEAK.load(Ordering::Relaxed) - before;
            line += &format!(", {:.1} MB above inputs", peak as f64 / 1e6);
        }
        self.lines.push(line);
    }

    fn lengths(&mut self) {
        let both = self.both;
        for length in LENGTHS {
            let spec = || spec(Mask::Causal, length);
            let forward_flops = forward_flops(&spec());
            let both_flops = 3.5 * forward_flops;
            let device = self.device.clone().autodiff();
            let [q, k, v, grad] = [(); 4].map(|_| random([1, length, HEADS, DIM], &device));
            let [plain_q, plain_k, plain_v] = [&q, &k, &v].map(|tensor| tensor.clone().inner());

            self.measure("fused forward", length, forward_flops, || {
                attention(plain_q.clone(), plain_k.clone(), plain_v.clone(), spec());
            });

            let plain = [&plain_q, &plain_k, &plain_v, &grad.clone().inner()].map(Clone::clone);
            self.measure("fused forward+backward", length, both_flops, || {
                both(&plain, &spec());
            });

            let [q, k, v] = [q, k, v].map(|tensor| tensor.require_grad());
            self.measure("fused forward+backward, autodiff", length, both_flops, || {
                let (out, _) = attention(q.clone(), k.clone(), v.clone(), spec());
                (out * grad.clone()).sum().backward();
            });

            if length <= BURN_UP_TO {
                self.measure("Burn forward+backward, autodiff", length, both_flops, || {
                    let options = AttentionModuleOptions {
                        is_causal: true,
                        ..Default::default()
                    };
                    let [q, k, v] = [&q, &k, &v].map(|tensor| tensor.clone().swap_dims(1, 2));
                    let out = module::attention(q, k, v, None, None, options);
                    (out * grad.clone().swap_dims(1, 2)).sum().backward();
                });
            }
        }
    }

    fn compare(&mut self, length: usize, cases: [(&str, AttentionSpec); 2]) {
        let inputs = [(); 4].map(|_| random([1, length, HEADS, DIM], &self.device));
        let both = self.both;
        for (name, spec) in cases {
            self.measure(name, length, 3.5 * forward_flops(&spec), || both(&inputs, &spec));
        }
    }

    fn all(&mut self) {
        self.lengths();
        let window = Mask::Window { size: WINDOW, sink: 0 };
        self.compare(
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
        self.compare(
            DROPOUT_AT,
            [
                ("dropout: none, forward+backward", without),
                ("dropout: a tenth, forward+backward", with),
            ],
        );
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
fn both<B: Kernels>(inputs: &[Tensor<4>; 4], spec: &AttentionSpec)
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let [q, k, v, grad] = inputs.each_ref().map(primitive::<B>);
    let (out, stats) = B::attention_forward(q.clone(), k.clone(), v.clone(), spec);
    B::attention_backward(q, k, v, out, stats, grad, spec);
}

fn primitive<B: Kernels>(tensor: &Tensor<4>) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    tensor
        .clone()
        .try_into_primitive::<B>()
        .expect("a tensor on the device")
}

/// GFLOP/s of a large matrix product through Burn.
fn matmul_rate(device: &Device) -> f64 {
    const SIZE: usize = 2048;
    let [a, b] = [(); 2].map(|_| Tensor::<2>::random([SIZE; 2], Distribution::Default, device));
    let best = (0..8).map(|_| {
        device.sync().expect("a device that works");
        let start = Instant::now();
        let product = a.clone().matmul(b.clone());
        device.sync().expect("a device that works");
        drop(product);
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
    let mut lines = Vec::new();
    let mut bench = |label: &'static str, device: Device, both: fn(&[Tensor<4>; 4], &AttentionSpec)| {
        let rate = matmul_rate(&device);
        lines.push(format!("{label}: matmul 2048^3: {rate:.0} GFLOP/s"));
        let mut bench = Bench {
            criterion: &mut criterion,
            device,
            label,
            rate,
            both,
            lines: &mut lines,
        };
        bench.all();
    };
    bench(FLEX, Device::flex(), both::<Flex>);
    #[cfg(feature = "wgpu")]
    for (label, path) in [
        ("wgpu by tiles", AttentionPath::Tiles),
        ("wgpu by products", AttentionPath::Products { block: 1024 }),
    ] {
        AttentionPath::force(Some(path));
        bench(label, Device::wgpu(Default::default()), both::<burn_cubecl::Cube>);
    }
    criterion.final_summary();
    println!("\n{}", lines.join("\n"));
}
