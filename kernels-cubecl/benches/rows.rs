//! Row-wise kernels against Burn's own layers and a plain copy: `cargo bench -p kernels-cubecl --bench rows`.
//!
//! Ends with a table of medians, in milliseconds, relative to the copy and to Burn.

use std::{
    collections::BTreeMap,
    hint::black_box,
    time::{Duration, Instant},
};

use burn::{
    nn::{DropoutConfig, LayerNormConfig, RmsNormConfig},
    tensor::{Device, Distribution, Tensor, activation::silu},
};
use criterion::Criterion;
use kernels_cubecl::{DropoutSpec, Positions, RotaryStyle, dropout, layer_norm, rms_norm, rotary, swiglu};

// Fresh pages from the system cost several times the copy of their bytes; this allocator keeps its pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ROWS: usize = 8192;
const FEATURES: usize = 1024;

/// Runs the benchmarks and keeps their times for the table.
struct Bench {
    criterion: Criterion,
    seconds: BTreeMap<String, Vec<f64>>,
}

impl Bench {
    fn run(&mut self, name: &str, mut body: impl FnMut()) {
        let seconds = self.seconds.entry(name.to_string()).or_default();
        self.criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    let start = Instant::now();
                    body();
                    let time = start.elapsed();
                    seconds.push(time.as_secs_f64());
                    total += time;
                }
                total
            });
        });
    }

    fn median(&self, name: &str) -> Option<f64> {
        let mut seconds = self.seconds.get(name).filter(|seconds| !seconds.is_empty())?.clone();
        seconds.sort_by(f64::total_cmp);
        Some(seconds[seconds.len() / 2])
    }

    fn table(&self) {
        println!("{:<36} {:>9} {:>9} {:>9}", "median", "ms", "x copy", "x Burn");
        for name in self.seconds.keys() {
            let Some(time) = self.median(name) else { continue };
            let ratio = |other: Option<f64>| other.map_or("-".into(), |other| format!("{:.2}", time / other));
            let burn = name
                .strip_suffix("ours")
                .and_then(|operation| self.median(&format!("{operation}burn")));
            println!(
                "{name:<36} {:>9.2} {:>9} {:>9}",
                time * 1e3,
                ratio(self.median("copy")),
                ratio(burn)
            );
        }
    }
}

fn random(device: &Device) -> Tensor<2> {
    Tensor::random([ROWS, FEATURES], Distribution::Normal(0.0, 1.0), device)
}

/// Forward and backward from a random gradient, as inside a network; includes one product for the seed.
fn forward_backward(x: &Tensor<2>, seed: &Tensor<2>, operation: impl Fn(Tensor<2>) -> Tensor<2>) {
    let x = x.clone().detach().require_grad();
    let y = operation(x.clone());
    let grads = (y * seed.clone()).sum().backward();
    black_box(x.grad(&grads));
}

fn main() {
    let mut bench = Bench {
        criterion: Criterion::default()
            .without_plots()
            .sample_size(20)
            .warm_up_time(Duration::from_millis(500))
            .measurement_time(Duration::from_secs(3))
            .configure_from_args(),
        seconds: BTreeMap::new(),
    };
    let plain = Device::flex();
    let device = plain.clone().autodiff();

    let source = vec![1.0f32; ROWS * FEATURES];
    let mut target = vec![0.0f32; ROWS * FEATURES];
    bench.run("copy", || {
        let half = source.len() / 2;
        let (left, right) = target.split_at_mut(half);
        rayon::join(
            || left.copy_from_slice(&source[..half]),
            || right.copy_from_slice(&source[half..]),
        );
        black_box(&mut target);
    });

    let x = random(&plain);
    let x_tracked = random(&device);
    let seed = random(&device);
    bench.run("seed alone, fwd+bwd", || forward_backward(&x_tracked, &seed, |x| x));

    let weight = Tensor::<1>::ones([FEATURES], &plain);
    let bias = Tensor::<1>::zeros([FEATURES], &plain);
    let burn = LayerNormConfig::new(FEATURES).init(&plain);
    bench.run("layer_norm, fwd, ours", || {
        black_box(layer_norm(x.clone(), weight.clone(), bias.clone(), 1e-5));
    });
    bench.run("layer_norm, fwd, burn", || {
        black_box(burn.forward(x.clone()));
    });
    let tracked_weight = Tensor::<1>::ones([FEATURES], &device).require_grad();
    let tracked_bias = Tensor::<1>::zeros([FEATURES], &device).require_grad();
    let burn = LayerNormConfig::new(FEATURES).init(&device);
    bench.run("layer_norm, fwd+bwd, ours", || {
        forward_backward(&x_tracked, &seed, |x| {
            layer_norm(x, tracked_weight.clone(), tracked_bias.clone(), 1e-5)
        })
    });
    bench.run("layer_norm, fwd+bwd, burn", || {
        forward_backward(&x_tracked, &seed, |x| burn.forward(x))
    });

    let burn = RmsNormConfig::new(FEATURES).init(&plain);
    bench.run("rms_norm, fwd, ours", || {
        black_box(rms_norm(x.clone(), weight.clone(), 1e-5));
    });
    bench.run("rms_norm, fwd, burn", || {
        black_box(burn.forward(x.clone()));
    });
    let burn = RmsNormConfig::new(FEATURES).init(&device);
    bench.run("rms_norm, fwd+bwd, ours", || {
        forward_backward(&x_tracked, &seed, |x| rms_norm(x, tracked_weight.clone(), 1e-5))
    });
    bench.run("rms_norm, fwd+bwd, burn", || {
        forward_backward(&x_tracked, &seed, |x| burn.forward(x))
    });

    let up = random(&plain);
    let tracked_up = random(&device).require_grad();
    bench.run("swiglu, fwd, ours", || {
        black_box(swiglu(x.clone(), up.clone()));
    });
    bench.run("swiglu, fwd, burn", || {
        black_box(silu(x.clone()) * up.clone());
    });
    bench.run("swiglu, fwd+bwd, ours", || {
        forward_backward(&x_tracked, &seed, |x| swiglu(x, tracked_up.clone()))
    });
    bench.run("swiglu, fwd+bwd, burn", || {
        forward_backward(&x_tracked, &seed, |x| silu(x) * tracked_up.clone())
    });

    let spec = DropoutSpec {
        probability: 0.1,
        seed: 1,
        stream: 2,
        shape: vec![ROWS, FEATURES],
        positions: vec![Positions::whole(ROWS), Positions::whole(FEATURES)],
    };
    let burn = DropoutConfig::new(0.1).init();
    bench.run("dropout, fwd, ours", || {
        black_box(dropout(x.clone(), spec.clone()));
    });
    bench.run("dropout, fwd, burn", || {
        // Burn's layer does nothing off an autodiff device.
        black_box(burn.forward(x_tracked.clone()));
    });
    bench.run("dropout, fwd+bwd, ours", || {
        forward_backward(&x_tracked, &seed, |x| dropout(x, spec.clone()))
    });
    bench.run("dropout, fwd+bwd, burn", || {
        forward_backward(&x_tracked, &seed, |x| burn.forward(x))
    });

    let heads = x.clone().reshape([1, ROWS as i32, 16, 64]);
    let table = Tensor::<2>::random([ROWS, 32], Distribution::Uniform(-1.0, 1.0), &plain);
    for style in [RotaryStyle::Halves, RotaryStyle::Interleaved] {
        bench.run(&format!("rotary {style:?}, fwd, ours"), || {
            black_box(rotary(heads.clone(), table.clone(), table.clone(), style));
        });
    }

    bench.table();
    bench.criterion.final_summary();
}
