//! Row-wise kernels against Burn's own layers and a plain copy: `cargo bench -p kernels-cubecl --bench rows`, with
//! `--features wgpu` also on the default wgpu device.
//!
//! Ends with a table of medians: milliseconds, relative to the copy and to Burn, and the share of the copy's rate at
//! which the bytes move that the operation has to move.

use std::{
    collections::BTreeMap,
    hint::black_box,
    time::{Duration, Instant},
};

use burn::{
    nn::{DropoutConfig, LayerNormConfig, RmsNormConfig},
    tensor::{
        Device, Distribution, Tensor,
        activation::{gelu_approximate, silu},
    },
};
use criterion::Criterion;
use kernels_cubecl::{
    DropoutSpec, Positions, RotaryStyle, dropout, gelu, layer_norm, residual_layer_norm, rms_norm, rotary, swiglu,
};

// Fresh pages from the system cost several times the copy of their bytes; this allocator keeps its pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// On the CPU; a device gets a quarter, as the one at hand may be a CPU in disguise.
const ROWS: usize = 8192;
const FEATURES: usize = 1024;

/// Runs the benchmarks of one device and keeps their times for the table.
struct Bench<'a> {
    criterion: &'a mut Criterion,
    device: Device,
    name: &'static str,
    rows: usize,
    /// Of each benchmark, its times and how many whole tensors it has to read and write.
    runs: BTreeMap<String, (Vec<f64>, Option<f64>)>,
}

impl Bench<'_> {
    /// Runs a benchmark that has to read and write so many whole tensors, if that is known.
    fn run(&mut self, name: &str, tensors: impl Into<Option<usize>>, mut body: impl FnMut()) {
        let tensors = tensors.into().map(|tensors| tensors as f64);
        let (seconds, _) = self.runs.entry(name.to_string()).or_insert((Vec::new(), tensors));
        let device = &self.device;
        let name = format!("{}: {name}", self.name);
        self.criterion.bench_function(&name, |bencher| {
            bencher.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    device.sync().expect("a device that works");
                    let start = Instant::now();
                    body();
                    device.sync().expect("a device that works");
                    let time = start.elapsed();
                    seconds.push(time.as_secs_f64());
                    total += time;
                }
                total
            });
        });
    }

    fn median(&self, name: &str) -> Option<f64> {
        let (seconds, _) = self.runs.get(name).filter(|(seconds, _)| !seconds.is_empty())?;
        let mut seconds = seconds.clone();
        seconds.sort_by(f64::total_cmp);
        Some(seconds[seconds.len() / 2])
    }

    fn table(&self) {
        println!(
            "{:<36} {:>9} {:>9} {:>9} {:>9}",
            format!("median on {}", self.name),
            "ms",
            "x copy",
            "x Burn",
            "rate"
        );
        let text = |number: Option<f64>| number.map_or("-".into(), |number| format!("{number:.2}"));
        let copy = self.median("copy");
        for (name, (_, tensors)) in &self.runs {
            let Some(time) = self.median(name) else { continue };
            let burn = name
                .strip_suffix("ours")
                .and_then(|operation| self.median(&format!("{operation}burn")));
            // What makes the gradient to start from is not the operation's.
            let seed = if name.contains("bwd") {
                self.median("seed alone, fwd+bwd")
            } else {
                Some(0.0)
            };
            let rate = (|| Some(tensors.as_ref()? / (time - seed?) / (2.0 / copy?)))();
            println!(
                "{name:<36} {:>9.2} {:>9} {:>9} {:>9}",
                time * 1e3,
                text(copy.map(|copy| time / copy)),
                text(burn.map(|burn| time / burn)),
                text(rate)
            );
        }
    }
}

fn random(rows: usize, device: &Device) -> Tensor<2> {
    Tensor::random([rows, FEATURES], Distribution::Normal(0.0, 1.0), device)
}

/// Forward and backward from a random gradient, as inside a network; includes one product for the seed.
fn forward_backward(x: &Tensor<2>, seed: &Tensor<2>, operation: impl Fn(Tensor<2>) -> Tensor<2>) {
    let x = x.clone().detach().require_grad();
    let y = operation(x.clone());
    let grads = (y * seed.clone()).sum().backward();
    black_box(x.grad(&grads));
}

fn main() {
    let mut criterion = Criterion::default()
        .without_plots()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args();
    let devices = [
        ("flex", Device::flex(), ROWS),
        #[cfg(feature = "wgpu")]
        ("wgpu", Device::wgpu(Default::default()), ROWS / 4),
    ];
    let mut tables = Vec::new();
    for (name, device, rows) in devices {
        let mut bench = Bench {
            criterion: &mut criterion,
            device,
            name,
            rows,
            runs: BTreeMap::new(),
        };
        copy(&mut bench);
        norms(&mut bench);
        elementwise(&mut bench);
        tables.push((bench.name, bench.device, bench.rows, bench.runs));
    }
    for (name, device, rows, runs) in tables {
        let criterion = &mut criterion;
        Bench {
            criterion,
            device,
            name,
            rows,
            runs,
        }
        .table();
    }
    criterion.final_summary();
}

/// One read and one write of a tensor.
fn copy(bench: &mut Bench) {
    if bench.name == "flex" {
        let source = vec![1.0f32; ROWS * FEATURES];
        let mut target = vec![0.0f32; ROWS * FEATURES];
        bench.run("copy", 2, || {
            let half = source.len() / 2;
            let (left, right) = target.split_at_mut(half);
            rayon::join(
                || left.copy_from_slice(&source[..half]),
                || right.copy_from_slice(&source[half..]),
            );
            black_box(&mut target);
        });
    } else {
        let source = random(bench.rows, &bench.device);
        bench.run("copy", 2, || {
            black_box(source.clone() + 1.0);
        });
    }
}

fn norms(bench: &mut Bench) {
    let (rows, plain) = (bench.rows, bench.device.clone());
    let device = plain.clone().autodiff();
    let (x, x_tracked, seed) = (random(rows, &plain), random(rows, &device), random(rows, &device));
    bench.run("seed alone, fwd+bwd", None, || {
        forward_backward(&x_tracked, &seed, |x| x)
    });

    let weight = Tensor::<1>::ones([FEATURES], &plain);
    let bias = Tensor::<1>::zeros([FEATURES], &plain);
    let burn = LayerNormConfig::new(FEATURES).init(&plain);
    bench.run("layer_norm, fwd, ours", 2, || {
        black_box(layer_norm(x.clone(), weight.clone(), bias.clone(), 1e-5));
    });
    bench.run("layer_norm, fwd, burn", 2, || {
        black_box(burn.forward(x.clone()));
    });
    let tracked_weight = Tensor::<1>::ones([FEATURES], &device).require_grad();
    let tracked_bias = Tensor::<1>::zeros([FEATURES], &device).require_grad();
    let burn = LayerNormConfig::new(FEATURES).init(&device);
    bench.run("layer_norm, fwd+bwd, ours", 5, || {
        forward_backward(&x_tracked, &seed, |x| {
            layer_norm(x, tracked_weight.clone(), tracked_bias.clone(), 1e-5)
        })
    });
    bench.run("layer_norm, fwd+bwd, burn", 5, || {
        forward_backward(&x_tracked, &seed, |x| burn.forward(x))
    });

    let update = random(rows, &device).require_grad();
    let burn_dropout = DropoutConfig::new(0.1).init();
    bench.run("residual layer_norm, fwd+bwd, ours", 9, || {
        forward_backward(&x_tracked, &seed, |x| {
            let (weight, bias) = (tracked_weight.clone(), tracked_bias.clone());
            residual_layer_norm(x, update.clone(), Some(spec(rows)), weight, bias, 1e-5).1
        })
    });
    bench.run("residual layer_norm, fwd+bwd, burn", 9, || {
        forward_backward(&x_tracked, &seed, |x| {
            burn.forward(x + burn_dropout.forward(update.clone()))
        })
    });

    let burn = RmsNormConfig::new(FEATURES).init(&plain);
    bench.run("rms_norm, fwd, ours", 2, || {
        black_box(rms_norm(x.clone(), weight.clone(), 1e-5));
    });
    bench.run("rms_norm, fwd, burn", 2, || {
        black_box(burn.forward(x.clone()));
    });
    let burn = RmsNormConfig::new(FEATURES).init(&device);
    bench.run("rms_norm, fwd+bwd, ours", 5, || {
        forward_backward(&x_tracked, &seed, |x| rms_norm(x, tracked_weight.clone(), 1e-5))
    });
    bench.run("rms_norm, fwd+bwd, burn", 5, || {
        forward_backward(&x_tracked, &seed, |x| burn.forward(x))
    });
}

fn elementwise(bench: &mut Bench) {
    let (rows, plain) = (bench.rows, bench.device.clone());
    let device = plain.clone().autodiff();
    let (x, x_tracked, seed) = (random(rows, &plain), random(rows, &device), random(rows, &device));
    let up = random(rows, &plain);
    let tracked_up = random(rows, &device).require_grad();
    bench.run("swiglu, fwd, ours", 3, || {
        black_box(swiglu(x.clone(), up.clone()));
    });
    bench.run("swiglu, fwd, burn", 3, || {
        black_box(silu(x.clone()) * up.clone());
    });
    bench.run("swiglu, fwd+bwd, ours", 8, || {
        forward_backward(&x_tracked, &seed, |x| swiglu(x, tracked_up.clone()))
    });
    bench.run("swiglu, fwd+bwd, burn", 8, || {
        forward_backward(&x_tracked, &seed, |x| silu(x) * tracked_up.clone())
    });

    bench.run("gelu, fwd, ours", 2, || {
        black_box(gelu(x.clone()));
    });
    bench.run("gelu, fwd, burn", 2, || {
        black_box(gelu_approximate(x.clone()));
    });
    bench.run("gelu, fwd+bwd, ours", 5, || forward_backward(&x_tracked, &seed, gelu));
    bench.run("gelu, fwd+bwd, burn", 5, || {
        forward_backward(&x_tracked, &seed, gelu_approximate)
    });

    let spec = spec(rows);
    let burn = DropoutConfig::new(0.1).init();
    bench.run("dropout, fwd, ours", 2, || {
        black_box(dropout(x.clone(), spec.clone()));
    });
    bench.run("dropout, fwd, burn", 2, || {
        // Burn's layer does nothing off an autodiff device.
        black_box(burn.forward(x_tracked.clone()));
    });
    bench.run("dropout, fwd+bwd, ours", 4, || {
        forward_backward(&x_tracked, &seed, |x| dropout(x, spec.clone()))
    });
    bench.run("dropout, fwd+bwd, burn", 4, || {
        forward_backward(&x_tracked, &seed, |x| burn.forward(x))
    });

    let heads = x.clone().reshape([1, rows as i32, 16, 64]);
    let table = Tensor::<2>::random([rows, 32], Distribution::Uniform(-1.0, 1.0), &plain);
    for style in [RotaryStyle::Halves, RotaryStyle::Interleaved] {
        bench.run(&format!("rotary {style:?}, fwd, ours"), 2, || {
            black_box(rotary(heads.clone(), table.clone(), table.clone(), style));
        });
    }
}

fn spec(rows: usize) -> DropoutSpec {
    DropoutSpec {
        probability: 0.1,
        seed: 1,
        stream: 2,
        shape: vec![rows, FEATURES],
        positions: vec![Positions::whole(rows), Positions::whole(FEATURES)],
    }
}
